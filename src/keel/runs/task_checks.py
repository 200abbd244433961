"""Checks a task with one forward pass before the first round, so that a mismatch is one clear line.

The same pass shows how the model is called: which of its outputs counts, and whether it takes integers.
"""

import logging
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel.config.schema import Spec
from keel.core.adapted import Adapter, adapted, own_loss
from keel.core.buffers import moving_buffers
from keel.core.examples import Examples, FederatedData
from keel.core.flat_model import FlatModel
from keel.core.losses import one_per_example
from keel.core.metrics import Metric, encode
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng
from keel.core.transforms import AsFloat
from keel.errors import KeelError

log = logging.getLogger(__name__)

MAX_COLLECTED = 2 << 30
"""The largest number of bytes that a metric may collect from all test examples."""
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)
"""What a forward pass on inputs of the wrong kind raises."""


def checked_task(task: Task, spec: Spec) -> Task:
    """The task with its moving buffers, a module that takes and returns one tensor, and a loss per example.

    Raises:
        KeelError: Model, loss, metrics and data do not fit together.
    """
    FlatModel(task.module)
    module = deepcopy(task.module).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with keyed_torch_rng(0, "trial"), torch.no_grad():
        for parameter in module.parameters():  # away from the initial values, where some buffers do not move
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        task, outputs, examples = _called(task, module)
        task = _with_loss(task, outputs, examples)
    compared = task.compared(outputs, examples.targets)
    _check_outputs(task.data, *compared)
    _check_metrics(task, *compared)
    task = replace(task, moving=moving_buffers(module, before, spec.model.buffers))
    _check_single_example(task, spec)
    return task


def _called(task: Task, module: nn.Module) -> tuple[Task, Tensor, Examples]:
    """Call the module on two examples; return the task with the module as the engines call it, and the outputs."""
    data = task.data
    examples = data.train[data.partition.indices[:2]]
    inputs = data.transform(examples.inputs)
    adapter = Adapter(data.train.packing, task.loss is own_loss)
    try:
        try:
            output = adapter.raw(module, inputs)
        except FAILURES:
            if data.train.packing is not None or inputs.is_floating_point():
                raise
            output = adapter.raw(module, inputs.float())  # most models take floats
            task = replace(task, data=replace(data, transform=AsFloat(data.transform)))
    except FAILURES as error:
        raise _model_error(data, inputs, examples.targets, error) from error
    if adapter == Adapter() and isinstance(output, Tensor):
        return task, output, examples
    return replace(task, module=adapted(task.module, adapter)), adapter.tensor(output, inputs), examples


def _model_error(data: FederatedData, inputs: Tensor, targets: Tensor, error: Exception) -> KeelError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    packing = data.train.packing
    shapes = [str(tuple(inputs.shape[1:]))] if packing is None else [str(part.shape) for part in packing.parts]
    label = f" with label {targets[0]}" if targets.dim() == 1 else ""
    return KeelError(
        f"model fails on an input of shape {', '.join(shapes)}{label} ({reason}); use a model that fits the data"
        f"{_hint_on_labels(data)}"
    )


def _with_loss(task: Task, outputs: Tensor, examples: Examples) -> Task:
    """Return the task with a loss per example."""
    if task.loss is own_loss:
        return replace(task, next_token=_predicts_next_token(task, outputs, examples.targets))
    try:
        return replace(task, loss=one_per_example(task.loss, outputs, examples.targets))
    except KeelError:
        raise
    except FAILURES as error:
        reason, shapes = (
            str(error).strip().splitlines()[0],
            (tuple(outputs.shape[1:]), tuple(examples.targets.shape[1:])),
        )
        if task.data.classes and examples.targets.dim() == 1:
            raise _model_error(task.data, examples.inputs, examples.targets, error) from error
        raise KeelError(
            f"loss fails on outputs of shape {shapes[0]} and targets of shape {shapes[1]} ({reason}); use a model or a "
            "loss that fits the targets"
        ) from error


def _check_outputs(data: FederatedData, outputs: Tensor, targets: Tensor) -> None:
    positions = targets.dim()  # of a label: the example, and its position in a sequence
    if data.classes and (outputs.dim() != positions + 1 or outputs.shape[-1] < data.classes):
        raise KeelError(
            f"model must have {data.classes} outputs, one per class (got outputs of shape {tuple(outputs.shape[1:])})"
            f"{_hint_on_labels(data)}"
        )


def _hint_on_labels(data: FederatedData) -> str:
    """Return a hint if the labels are counted from 1."""
    if data.kind != "classification":
        return ""
    present = {*torch.unique(data.train.targets).tolist(), *torch.unique(data.test.targets).tolist()}
    if present != set(range(1, data.classes)):
        return ""
    return f"; the labels are 1 to {data.classes - 1}: to count them from 0, subtract 1"


def _check_metrics(task: Task, outputs: Tensor, targets: Tensor) -> None:
    for metric in task.metrics:
        try:
            one, two = (metric.state(outputs[:count], targets[:count]) for count in (1, 2))
        except FAILURES as error:
            reason, shapes = str(error).strip().splitlines()[0], (tuple(outputs.shape[1:]), tuple(targets.shape[1:]))
            raise KeelError(
                f"evaluation.metrics: {metric.name!r} fails on outputs of shape {shapes[0]} and targets of shape "
                f"{shapes[1]} ({reason}); use a metric that fits the task"
            ) from error
        size = 8 * (len(encode([two])) - len(encode([one]))) * len(task.data.test)
        if size > MAX_COLLECTED:
            raise KeelError(
                f"evaluation.metrics: {metric.name!r} collects the outputs of all test examples, {size / 1e9:.0f} GB; "
                "use a metric of torchmetrics that is a sum, or fewer data.test_examples"
            )
        _try_function(metric, two)


def _try_function(metric: Metric, state: list[Tensor]) -> None:
    """Raise a KeelError if a user's function has a mistake. That it may need more examples than two is none."""
    try:
        metric.value([state])
    except (TypeError, AttributeError, NameError, KeelError) as error:
        raise KeelError(f"evaluation.metrics: {metric.name!r} fails ({str(error).strip().splitlines()[0]})") from error
    except Exception as error:  # it is called again on all test examples
        log.debug("metric %s fails on two examples: %s", metric.name, error)


def _predicts_next_token(task: Task, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether the model's own loss is the cross entropy of each position with the next target."""
    if task.data.kind != "sequence" or targets.shape[1] < 2:
        return False
    logits, _ = task.compared(outputs, targets)
    same = cross_entropy(logits.flatten(0, 1), targets.clamp(min=-1).flatten(), ignore_index=-1)
    shifted = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].clamp(min=-1).flatten(), ignore_index=-1)
    own = outputs[0, 0]
    return bool((own - shifted).abs() < (own - same).abs())


def _check_single_example(task: Task, spec: Spec) -> None:
    """If some minibatch has one example, check that the model can be trained on it: BatchNorm may not."""
    sizes, local, algorithm = task.data.partition.sizes, spec.local, spec.algorithm
    single = (sizes == 1) | (local.batch == 1)
    if not local.drop_last:
        single |= sizes % local.batch == 1
    if algorithm.probes or "full_gradient" in algorithm.observes:
        single |= sizes % task.data.chunk_size == 1
    if not single.any():
        return
    module: Any = deepcopy(task.module).train()
    try:
        with keyed_torch_rng(0, "trial"), torch.no_grad():
            module(task.data.transform(task.data.train[task.data.partition.indices[:1]].inputs))
    except (RuntimeError, ValueError) as error:
        raise KeelError(
            f"model cannot be trained on a minibatch of one example, which client {int(np.argmax(single))} has "
            f"({str(error).splitlines()[0]}); set local.drop_last = true, another local.batch, or model.buffers = "
            "'group_norm'"
        ) from error
