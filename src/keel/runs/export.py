"""Exports the trained model of a run: a safetensors file, a model card, and the config of transformers or peft."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.runs.checked_tensors import safetensors_parts
from keel.runs.files import write_atomic
from keel.runs.folder import RunFolder
from keel.runs.model_card import ADAPTERS_NAME, HUB_NAME, model_card
from keel.runs.model_record import ModelRecord
from keel.runs.trained import recorded_model, saved_model, trained_tensors

SUFFIX = ".safetensors"
HUB_CONFIG, ADAPTERS_CONFIG = "config.json", "adapter_config.json"
"""The names of the configs that transformers and peft read."""


@dataclass(frozen=True)
class Exported:
    """The files that an export wrote."""

    model: Path
    card: Path
    config: Path | None
    """config.json for a network of transformers, adapter_config.json for adapters."""
    sha256: str
    """Of the file `model`."""
    round: int


def export(
    folder: RunFolder, out: Path | None = None, *, force: bool = False, best: bool = False, adapters: bool = False
) -> Exported:
    """Write the model of a run's checkpoint, and its model card next to it.

    The tensors have the names of the module's state_dict; for a network of transformers, those of the network.

    Args:
        out: The file, whose name ends in .safetensors; without it model.safetensors, or adapter_model.safetensors.
        force: Overwrite existing files.
        best: The best model that a run with `evaluation.select` has kept, instead of the last one.
        adapters: Only the adapters of a model of peft, in the format of its `save_pretrained`.

    Raises:
        KeelError: The run has no checkpoint, it diverged, a file exists, or the model has no adapters.
    """
    record = recorded_model(folder)
    out = out or Path(ADAPTERS_NAME if adapters else HUB_NAME)
    if adapters:
        _check_adapters(record, out)
    if out.suffix != SUFFIX:
        raise KeelError(f"--out must end in {SUFFIX} (got {str(out)!r})")
    round, _, _ = saved_model(folder, best)
    tensors = trained_tensors(folder, best)
    summary = folder.summary
    diverged = not best and summary is not None and summary["status"] == "diverged"
    if diverged or not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise KeelError(
            f"run: {str(folder.path)!r} diverged, so that it has no model to export; use a smaller local.lr"
        )
    tensors, configs = _named(record, tensors, adapters)
    card, config = out.with_suffix(".md"), next((out.parent / name for name in configs), None)
    files = [out, card, *([config] if config else [])]
    existing = [file for file in files if file.exists()]
    if existing and not force:
        raise KeelError(f"--out: {str(existing[0])!r} exists; use another name, or overwrite it with --force")
    out.parent.mkdir(parents=True, exist_ok=True)
    digest = sha256()
    write_atomic(out, _hashed(safetensors_parts(tensors, _metadata(folder, round)), digest.update))
    if config is not None:
        write_atomic(config, [(json.dumps(configs[config.name], indent=2) + "\n").encode()])
    write_atomic(card, [model_card(folder, out.name, round, tensors, digest.hexdigest()).encode()])
    return Exported(out, card, config, digest.hexdigest(), round)


def _check_adapters(record: ModelRecord, out: Path) -> None:
    if record.adapters is None:
        raise KeelError(f"--adapters requires a model of the library peft (got {record.class_name}); leave it out")
    if out.name != ADAPTERS_NAME:
        raise KeelError(f"--out must be called {ADAPTERS_NAME} with --adapters, as peft requires (got {str(out)!r})")


def _named(
    record: ModelRecord, tensors: dict[str, Tensor], adapters: bool
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors by the names that PyTorch, transformers or peft reads, and the config by its file name, if any."""
    if adapters and record.adapters is not None:
        named = {name: tensors[own] for name, own in record.adapters.names.items()}
        return named, {ADAPTERS_CONFIG: record.adapters.config}
    if record.hub is not None:
        prefix = record.hub["prefix"]
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return named, {HUB_CONFIG: record.hub["config"]}
    return tensors, {}


def _metadata(folder: RunFolder, round: int) -> dict[str, str]:
    """The strings in the header of the file. transformers requires the format; a private run's seed stays secret."""
    table, environment = folder.table, folder.environment
    seed = {"seed": str(table["seed"])} if table.get("privacy") is None else {}
    return {
        "format": "pt",
        "keel": environment["keel"],
        "algorithm": folder.title,
        "data": table["data"]["name"],
        "model": table["model"]["name"],
        "rounds": str(round),
        **seed,
    }


def _hashed(parts: Iterable[bytes | memoryview], update: Callable[[Any], None]) -> Iterator[bytes | memoryview]:
    """Yield the parts, and pass each to `update` of a hash."""
    for part in parts:
        update(part)
        yield part
