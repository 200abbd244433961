"""Checks a task with one forward pass before the first round, so that a mismatch is one clear line."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from keel.config.schema import Spec
from keel.core.buffers import moving_buffers
from keel.core.examples import FederatedData
from keel.core.flat_model import FlatModel
from keel.core.randomness import keyed_torch_rng
from keel.core.task import Task
from keel.errors import KeelError


def checked_task(task: Task, spec: Spec) -> Task:
    """The task with the names of its moving buffers.

    Raises:
        KeelError: Model, loss and data do not fit together.
    """
    FlatModel(task.module)
    data = task.data
    examples = data.train[data.partition.indices[:2]]
    inputs = data.transform(examples.inputs)
    module = deepcopy(task.module).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with keyed_torch_rng(0, "trial"), torch.no_grad():
            for parameter in module.parameters():  # away from the initial values, where some buffers do not move
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            outputs = module(inputs)
            losses = task.loss(outputs, examples.targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason, shape = str(error).strip().splitlines()[0], tuple(inputs.shape[1:])
        raise KeelError(
            f"model fails on an input of shape {shape} with label {examples.targets[0]} ({reason}); use a model that "
            f"fits the data{_hint_on_labels(data)}"
        ) from error
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (len(examples),):
        returned = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise KeelError(
            f"loss must return one loss per example, as with reduction='none' (got {returned} for {len(examples)} "
            "examples)"
        )
    positions = examples.targets.dim()  # of a label: the example, and its position in a sequence
    if data.classes and (outputs.dim() != positions + 1 or outputs.shape[-1] < data.classes):
        raise KeelError(
            f"model must have {data.classes} outputs, one per class (got outputs of shape {tuple(outputs.shape[1:])})"
            f"{_hint_on_labels(data)}"
        )
    task = replace(task, moving=moving_buffers(module, before, spec.model.buffers))
    _check_single_example(task, module, spec)
    return task


def _hint_on_labels(data: FederatedData) -> str:
    """Return a hint if the labels are counted from 1."""
    present = {*torch.unique(data.train.targets).tolist(), *torch.unique(data.test.targets).tolist()}
    if data.classes < 2 or present != set(range(1, data.classes)):
        return ""
    return f"; the labels are 1 to {data.classes - 1}: to count them from 0, subtract 1"


def _check_single_example(task: Task, module: nn.Module, spec: Spec) -> None:
    """If some minibatch has one example, check that the model can be trained on it: BatchNorm may not."""
    sizes, local, algorithm = task.data.partition.sizes, spec.local, spec.algorithm
    single = (sizes == 1) | (local.batch == 1)
    if not local.drop_last:
        single |= sizes % local.batch == 1
    if algorithm.probes or "full_gradient" in algorithm.observes:
        single |= sizes % task.data.chunk_size == 1
    if not single.any():
        return
    try:
        with keyed_torch_rng(0, "trial"), torch.no_grad():
            module(task.data.transform(task.data.train[task.data.partition.indices[:1]].inputs))
    except (RuntimeError, ValueError) as error:
        raise KeelError(
            f"model cannot be trained on a minibatch of one example, which client {int(np.argmax(single))} has "
            f"({str(error).splitlines()[0]}); set local.drop_last = true, another local.batch, or model.buffers = "
            "'group_norm'"
        ) from error
