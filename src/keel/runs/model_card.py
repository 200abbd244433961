"""The model card of an exported model: where it comes from, how good it is, and how to load it."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from torch import Tensor

from keel.config.overrides import flatten
from keel.config.schema import CUSTOM
from keel.core.records import Record, primary_metric
from keel.errors import KeelError
from keel.models import find
from keel.runs.folder import RunFolder
from keel.runs.trained import recorded_model
from keel.settings import takes_shape_and_classes
from keel.units import percent, size

HUB_NAME = "model.safetensors"
"""The name of the file that transformers loads from a folder."""
ADAPTERS_NAME = "adapter_model.safetensors"
"""The name of the file that peft loads from a folder."""
POLICIES = {
    "group_norm": "from keel.models.normalisation import group_norm\nmodel = group_norm(model)  # as it was trained",
    "local": "from keel.core.buffers import without_statistics\n"
    "model = without_statistics(model)  # BatchNorm uses the statistics of each batch, as it was evaluated",
}
"""The lines that give a model the normalisation layers of the run, by `model.buffers`."""


def model_card(folder: RunFolder, file: str, round: int, tensors: Mapping[str, Tensor], sha256: str) -> str:
    """Write the model card in Markdown.

    Args:
        file: The name of the exported file.
        round: The round after which the model was saved.
    """
    rows = {**_training_rows(folder, round), **_model_rows(folder, tensors), "SHA-256 of the file": f"`{sha256}`"}
    table = "\n".join("| {} | {} |".format(name, value.replace("|", "\\|")) for name, value in rows.items())
    spec = {key: value for key, value in flatten(folder.table).items() if key.startswith(("local.", "server."))}
    settings = ", ".join(f"`{key} = {value}`" for key, value in spec.items())
    return (
        f"# {file}\n\nA model trained by federated learning with Keel (`keel-fl`).\n\n"
        f"| | |\n|---|---|\n{table}\n\nOptimisation: {settings}.\n\n"
        f"## Load it\n\n```python\n{_loading(folder, file)}\n```\n"
    )


def _training_rows(folder: RunFolder, round: int) -> dict[str, str]:
    table, data = folder.table, folder.client_statistics or {}
    hyperparameters = {key: value for key, value in table["algorithm"].items() if key != "name"}
    method = ", ".join([folder.title, *(f"`{key} = {value}`" for key, value in hyperparameters.items())])
    records = [record for record in folder.records() if record["round"] <= round]
    down, up = (sum(record[key] for record in records) for key in ("bytes_down", "bytes_up"))
    rows = {"data": f"{data.get('name', table['data']['name'])}{data.get('split', '')}"}
    if data:
        rows["examples"] = f"{data['train_examples']:,} for training, {data['test_examples']:,} for evaluation"
        rows["clients"] = f"{data['clients']:,}, participation rate {table['participation']['rate']:g}"
    return {
        **rows,
        "method": method,
        **_privacy_rows(table, round, records),
        "bytes sent": f"{size(down + up)} ({size(down)} down, {size(up)} up)",
        **_metric_rows(folder, records),
    }


def _privacy_rows(table: Mapping[str, Any], round: int, records: list[Record]) -> dict[str, str]:
    """The rounds, and the privacy of the model. Whoever knows the seed of a private run can subtract its noise."""
    rounds, privacy = f"{round} of {table['rounds']}", table.get("privacy")
    if privacy is None:
        return {"rounds": f"{rounds}, seed {table['seed']}"}
    epsilon = records[-1].get("epsilon") if records else 0.0
    spent = "not private" if epsilon is None else f"epsilon {epsilon:.3g} at delta {privacy['delta']:g}"
    how = f"mechanism {privacy['mechanism']}, sampler {table['participation']['sampler']}"
    return {"rounds": rounds, "privacy": f"{spent} ({how})"}


def _metric_rows(folder: RunFolder, records: list[Record]) -> dict[str, str]:
    """The metrics of the last evaluation up to the checkpoint."""
    on = folder.table["evaluation"]["on"]
    evaluated: Mapping[str, Any] = dict(next((r for r in reversed(records) if "test_loss" in r), {}))
    primary, rows = primary_metric(folder.environment), {}
    if (value := evaluated.get(primary.name)) is not None:
        text = percent(value) if primary.is_fraction else f"{value:.4g}"
        rows[f"{primary.name} ({on} examples)"] = f"{text} after round {evaluated['round']}"
    return rows


def _model_rows(folder: RunFolder, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    environment, model = folder.environment, folder.table["model"]
    name = recorded_model(folder).class_name if model["name"] == CUSTOM else model["name"]
    settings = [f"`{key} = {_file_name(value)}`" for key, value in model.items() if key != "name"]
    return {
        "model": ", ".join([name, *settings]),
        "parameters": f"{environment['parameters']:,} trained, {len(tensors)} tensors in all",
        "versions": f"keel {environment['keel']}, torch {environment['torch']}, Python {environment['python']}",
    }


def _loading(folder: RunFolder, file: str) -> str:
    """The lines of Python that load the model."""
    if file == ADAPTERS_NAME and recorded_model(folder).adapters is not None:
        return (
            "from peft import PeftModel\n"
            "base = ...  # the model that the adapters were added to\n"
            'model = PeftModel.from_pretrained(base, ".")  # this folder'
        )
    hub, policy = recorded_model(folder).hub, POLICIES.get(folder.table["model"].get("buffers", ""))
    if hub is not None and file == HUB_NAME and policy is None:
        architecture = hub["config"]["architectures"][0]
        return f'from transformers import {architecture}\nmodel = {architecture}.from_pretrained(".")  # this folder'
    lines = [
        "from safetensors.torch import load_file",
        _making(folder) if hub is None else _making_hub(hub["config"]["architectures"][0]),
        *([policy] if policy else []),
        f'model.load_state_dict(load_file("{file}"))',
    ]
    return "\n".join(lines)


def _making_hub(architecture: str) -> str:
    return (
        f"from transformers import AutoConfig, {architecture}\n"
        f'model = {architecture}(AutoConfig.from_pretrained("."))  # config.json in this folder'
    )


def _making(folder: RunFolder) -> str:
    """The lines that make the model."""
    model, data = folder.table["model"], folder.client_statistics
    settings = {key: value for key, value in model.items() if key not in ("name", "buffers", "init")}
    if model["name"] == CUSTOM or data is None:
        return f"model = {recorded_model(folder).class_name}(...)  # the model that was passed to keel.run"
    if ":" in model["name"] and not _takes_shape(model["name"]):
        module, _, name = model["name"].partition(":")
        arguments = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        return f"from {module} import {name}\nmodel = {name}({arguments})"
    shape, classes = tuple(data["input_shape"]), data.get("outputs", data["classes"])
    return f'from keel.models import build\nmodel = build("{model["name"]}", {shape}, {classes}, {settings})'


def _takes_shape(name: str) -> bool:
    """Whether Keel calls the function with the shape of the data; True if it cannot be imported any more."""
    try:
        return takes_shape_and_classes(find(name))
    except KeelError:
        return True


def _file_name(value: Any) -> Any:
    """A path without the folders of this machine."""
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value
