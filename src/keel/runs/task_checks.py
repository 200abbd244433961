"""Checks a task with one forward pass before the first round, so that a mismatch is one clear line.

The same pass shows how the model is called: which of its outputs counts, and whether it takes integers.
"""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel.config.schema import Spec
from keel.core.adapted import Adapter, adapted, own_loss
from keel.core.buffers import moving_buffers
from keel.core.copies import sharing_frozen
from keel.core.examples import Examples, FederatedData
from keel.core.fast_path import ignores_adapters
from keel.core.flat_model import FlatModel
from keel.core.losses import one_per_example
from keel.core.metrics import FunctionMetric, Metric, encode
from keel.core.task import Task, default_loss
from keel.core.torch_randomness import keyed_torch_rng
from keel.core.transforms import AsType
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
    module = sharing_frozen(task.module).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with keyed_torch_rng(0, "trial"):
        with torch.no_grad():
            for parameter in module.parameters():  # away from the initial values, where some buffers do not move
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        task, outputs, examples = _called(task, module)
        task = _with_loss(task, outputs, examples)
        if not task.loss(outputs, examples.targets).requires_grad:
            raise KeelError("loss does not depend on the model's parameters; compute it from the outputs, not detached")
    compared = task.compared(outputs.detach(), examples.targets)
    _check_outputs(task.data, *compared)
    _check_metrics(task, *compared)
    task = replace(task, moving=moving_buffers(module, before, spec.model.buffers))
    _check_single_example(task, spec)
    _check_single_test_example(task, spec)
    if ignores_adapters(task.module):
        log.warning(
            "in evaluation mode nn.TransformerEncoderLayer ignores adapters; Keel evaluates with "
            "torch.backends.mha.set_fastpath_enabled(False), which the use of the trained model requires too"
        )
    return task


def _called(task: Task, module: nn.Module) -> tuple[Task, Tensor, Examples]:
    """Call the module on two examples; return the task with the module as the engines call it, and the outputs."""
    data = task.data
    examples = data.train[data.partition.indices[:2]]
    inputs = data.transform(examples.inputs)
    adapter = Adapter(data.train.packing, task.loss is own_loss)
    try:
        output, dtype = _output(adapter, module, inputs)
    except FAILURES as error:
        raise _model_error(data, inputs, examples.targets, error) from error
    if dtype != inputs.dtype:
        task = replace(task, data=replace(data, transform=AsType(data.transform, dtype)))
    if adapter == Adapter() and isinstance(output, Tensor):
        return task, output, examples
    return replace(task, module=adapted(task.module, adapter)), adapter.tensor(output, inputs), examples


def _output(adapter: Adapter, module: nn.Module, inputs: Tensor) -> tuple[Any, torch.dtype]:
    """Return what the model returns, and the type of inputs that it takes: their own, int64, or float32."""
    if adapter.packing is not None or inputs.is_floating_point():
        return adapter.raw(module, inputs), inputs.dtype
    errors: list[Exception] = []
    for dtype in dict.fromkeys((inputs.dtype, torch.int64, torch.float32)):
        try:
            return adapter.raw(module, inputs.to(dtype)), dtype
        except FAILURES as error:
            errors.append(error)
    raise next((error for error in errors if isinstance(error, IndexError)), errors[-1])  # a token that is too large


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
        if task.loss is default_loss(task.data) and examples.targets.dim() == 1:
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
        _check_metric_broadcasting(metric, outputs, targets)


def _try_function(metric: Metric, state: list[Tensor]) -> None:
    """Raise a KeelError if a user's function has a mistake. That it may need more examples than two is none."""
    try:
        metric.value([state])
    except KeelError:
        raise
    except (TypeError, AttributeError, NameError) as error:
        raise KeelError(f"evaluation.metrics: {metric.name!r} fails ({str(error).strip().splitlines()[0]})") from error
    except Exception as error:  # it is called again on all test examples
        log.debug("metric %s fails on two examples: %s", metric.name, error)


def _check_metric_broadcasting(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Raise a KeelError if a function compares every output (n, 1) with every target (n)."""
    if not isinstance(metric, FunctionMetric) or outputs.shape == targets.shape or outputs.numel() != targets.numel():
        return
    try:
        values = [metric.value([[shaped, targets]]) for shaped in (outputs, outputs.reshape(targets.shape))]
    except Exception as error:  # it takes outputs of one of the shapes
        log.debug("metric %s fails on reshaped outputs: %s", metric.name, error)
        return
    if abs(values[0] - values[1]) > 1e-6 * (1 + abs(values[1])):
        raise KeelError(
            f"evaluation.metrics: {metric.name!r} compares every output of shape {tuple(outputs.shape[1:])} with every "
            f"target of shape {tuple(targets.shape[1:])}; use outputs[:, 0] in the function"
        )


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
    if local.microbatch is not None and local.microbatch < local.batch:
        full, rest = np.minimum(sizes, local.batch), np.where(local.drop_last, 0, sizes % local.batch)
        single |= (local.microbatch == 1) | (full % local.microbatch == 1) | (rest % local.microbatch == 1)
    if algorithm.probes or "full_gradient" in algorithm.observes:
        single |= sizes % task.data.chunk_size == 1
    if single.any() and (reason := _failure_on_one_example(task)) is not None:
        raise KeelError(
            f"model cannot be trained on a minibatch of one example, which client {int(np.argmax(single))} has "
            f"({reason}); set local.drop_last = true, another local.batch or local.microbatch, or model.buffers = "
            "'group_norm'"
        )


def _check_single_test_example(task: Task, spec: Spec) -> None:
    """If one example is evaluated alone, check that the model can: BatchNorm without running statistics may not."""
    if spec.model.buffers != "local":
        return
    tests = task.client_tests
    which: str | None = None
    simulated = len(task.data.partition.sizes) > 1 and len(task.data.train) > 1  # a federation has a placeholder
    if simulated and len(task.data.test) == 1:
        which = f"evaluation.on = {spec.evaluation.on!r} has one example"
    elif tests is not None and (single := tests.partition.sizes % task.data.chunk_size == 1).any():
        which = f"evaluation.clients: client {tests.clients[np.argmax(single)]} is evaluated on one example alone"
    if which is not None and (reason := _failure_on_one_example(task)) is not None:
        raise KeelError(
            f"{which}, which model.buffers = 'local' cannot normalise ({reason}); use 'average' or 'group_norm'"
        )


def _failure_on_one_example(task: Task) -> str | None:
    """Return why the model fails on one example if it normalises by the minibatch's statistics; None if it does not."""
    module: Any = sharing_frozen(task.module).train()
    try:
        with keyed_torch_rng(0, "trial"), torch.no_grad():
            module(task.data.transform(task.data.train[task.data.partition.indices[:1]].inputs))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
