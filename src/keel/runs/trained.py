"""The trained model of a run folder: its tensors by name, and the module that they belong to."""

from copy import deepcopy

from pydantic import ValidationError
from torch import Tensor, nn

from keel.config.schema import CUSTOM, ModelSpec
from keel.core.buffers import without_statistics
from keel.core.evaluation import Evaluator
from keel.errors import KeelError, explain
from keel.models.normalisation import group_norm
from keel.models.weights import copy_tensors, misfit
from keel.runs.build import make_task
from keel.runs.checkpoint import load_model
from keel.runs.folder import RunFolder, best_model
from keel.runs.initial_model import build_module
from keel.runs.model_record import ModelRecord


def recorded_model(folder: RunFolder) -> ModelRecord:
    """What the run recorded of its model. In a folder of an earlier version, the model that its spec names."""
    record = folder.model
    if record is not None:
        return record
    table = folder.table
    if CUSTOM in (table["model"]["name"], table["data"]["name"]):
        raise KeelError(
            f"run: {str(folder.path)!r} of an earlier version does not record the names of its tensors; use "
            f"keel.resume({str(folder.path)!r}, model=..., data=...).module"
        )
    spec = folder.spec
    task = make_task(spec)
    evaluated = Evaluator(task, spec.model.buffers == "local").model
    return ModelRecord.of(task.module, evaluated, from_file=False)


def saved_model(folder: RunFolder, best: bool = False) -> tuple[int, Tensor, Tensor | None]:
    """The round, the weights and the buffers of the last checkpoint, or of the best model that the run has kept."""
    if not best:
        saved = load_model(folder.checkpoint_file)
        if saved is None:
            raise folder.no_checkpoint()
        folder.check_record(folder.checkpoint_file)
        return saved
    kept = best_model(folder)
    if kept is None:
        raise KeelError(
            f"run: {str(folder.path)!r} kept no best model; start runs with evaluation.on = 'validation' and "
            "evaluation.select = true"
        )
    return kept.round, kept.theta, kept.buffers


def trained_tensors(folder: RunFolder, best: bool = False) -> dict[str, Tensor]:
    """The state_dict of the last checkpoint, or of the best model. It does not require the model's class."""
    _, weights, buffers = saved_model(folder, best)
    record = recorded_model(folder)
    return record.layout.state_dict(weights, buffers, record.frozen or folder.frozen_tensors())


def trained_module(folder: RunFolder, model: nn.Module | None = None) -> nn.Module:
    """The trained module, in evaluation mode.

    Args:
        model: A module of the class that was trained, which is copied. Without it, the module that the spec names.
    """
    table, tensors = folder.table, trained_tensors(folder)
    if model is None and table["model"]["name"] == CUSTOM:
        raise KeelError(
            f"module: the model of this run was passed in Python; use keel.load({str(folder.path)!r}, model=...), or "
            "state_dict(), which does not require its class"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise KeelError(f"model must be an instance of Module (got {type(model).__name__})")
    module = _with_policy(_named_module(folder) if model is None else model, table["model"].get("buffers"))
    if reason := misfit(module, tensors):
        raise KeelError(f"model: the weights of {str(folder.path)!r} do not fit the model: {reason}")
    copy_tensors(module, tensors)
    return module.eval()


def _named_module(folder: RunFolder) -> nn.Module:
    """Build the module that the spec names. The data are not loaded: the folder records their shape."""
    table, data = folder.table, folder.client_statistics
    if data is None:
        return make_task(folder.spec).module
    try:
        model = ModelSpec.model_validate(table["model"])
    except ValidationError as error:
        raise KeelError(explain(error, "model")) from None
    return build_module(model, table["seed"], tuple(data["input_shape"]), data.get("outputs", data["classes"]))


def _with_policy(module: nn.Module, buffers: str | None) -> nn.Module:
    """A copy with the normalisation layers that the run evaluated."""
    if buffers == "group_norm":
        return group_norm(module)
    return without_statistics(module) if buffers == "local" else deepcopy(module)
