"""A task: the model, the data and the loss that a spec names, checked against each other and made ready to train."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel import models
from keel.buffers import moving_buffers
from keel.data import catalog
from keel.data.federated import FederatedData, Partition
from keel.data.partition import deal_out
from keel.data.preparation import ChannelsLast, Layout
from keel.devices import find_device
from keel.errors import KeelError
from keel.models.normalisation import group_norm
from keel.params import FlatModel, Loss
from keel.randomness import draws, torch_draws
from keel.runs.spec import EngineSpec, Spec

VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class Task:
    """What is learned, whoever learns it. `moving` names the model's buffers that training changes, `layout` that of
    images as they are prepared.
    """

    module: nn.Module
    data: FederatedData
    loss: Loss
    moving: tuple[str, ...] = ()
    layout: Layout = "contiguous"


def make_task(
    spec: Spec, *, module: nn.Module | None = None, data: FederatedData | None = None, loss: Loss | None = None
) -> Task:
    """The task of a spec; a module, data or loss that is passed takes the place of the one it names."""
    data = load_data(spec) if data is None else data
    if spec.evaluation.on == "validation":
        data = hold_out(data, spec.seed)
    if spec.algorithm.pooled:
        data = replace(data, partition=Partition.of([data.partition.indices]))
    if module is None:
        with torch_draws(spec.seed, "model"):
            module = models.build(spec.model.name, data.input_shape, data.classes, spec.model.settings)
    if spec.model.buffers == "group_norm":
        module = group_norm(module)
    if loss is not None and not callable(loss):
        raise KeelError(f"loss: {loss!r}; accepted: a function of outputs and targets that gives one loss per example")
    layout = spec.engine.layout or _fastest(data, module, spec.engine)
    if layout == "channels_last":
        if len(data.input_shape) != 3:
            raise KeelError(
                f"engine.layout: 'channels_last' is of images, but an example has the shape {tuple(data.input_shape)}; "
                "accepted: 'contiguous'"
            )
        data = replace(data, prepare=ChannelsLast(data.prepare))
    task = Task(module, data, loss or default_loss(data), layout=layout)
    return _tried(task, spec) if data.here else task


def _fastest(data: FederatedData, module: nn.Module, engine: EngineSpec) -> Layout:
    """By what there is to compute and where, not by a clock: convolutions on a CPU, of one client at a time."""
    device = engine.where if engine.on_ray else find_device(engine.where).type
    images = len(data.input_shape) == 3 and any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    return "channels_last" if images and device == "cpu" and engine.name != "cohort" else "contiguous"


def check_tasks(specs: Iterable[Spec]) -> None:
    """Whether the data and models of all of them can be had: one task is made for each setting of the two."""
    for spec in {(spec.data.model_dump_json(), spec.model.model_dump_json()): spec for spec in specs}.values():
        make_task(spec)


def default_loss(data: FederatedData) -> Loss:
    return per_sequence_cross_entropy(data.specials) if data.specials else per_example_cross_entropy


def per_example_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


@cache
def per_sequence_cross_entropy(specials: tuple[int, ...]) -> Loss:
    """The mean over the positions of a sequence that are not padding."""
    padding = specials[0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=padding)
        return losses.sum(1) / (targets != padding).sum(1).clamp(min=1)

    return loss


def load_data(spec: Spec) -> FederatedData:
    data = spec.data
    return deal_out(
        data.name,
        catalog.load(data.name, data.settings),
        spec.seed,
        data.partition or "dirichlet",
        clients=data.clients,
        alpha=data.alpha or 0.0,
        min_examples=data.min_examples,
        max_examples=data.max_examples,
        test_examples=data.test_examples,
    )


def hold_out(data: FederatedData, seed: int) -> FederatedData:
    """A fifth of each client's examples, to choose settings on in place of the test examples."""
    partition, stream = data.partition, draws(seed, "validation")
    shuffled = partition.indices.copy()
    for first, end in pairwise(partition.offsets.tolist()):
        stream.shuffle(shuffled[first:end])
    cuts = (partition.sizes * VALIDATION_SHARE).astype(np.int64)
    rank = np.arange(len(shuffled)) - np.repeat(partition.offsets[:-1], partition.sizes)
    held = rank < np.repeat(cuts, partition.sizes)
    chosen = shuffled[held]
    if len(chosen) == 0:
        raise KeelError("evaluation.on: no client has the five examples that a validation part needs; accepted: 'test'")
    kept = Partition(shuffled[~held], np.concatenate([[0], np.cumsum(partition.sizes - cuts)]))
    return replace(data, test=data.train[chosen], partition=kept, sha256=data.fingerprint())


def _tried(task: Task, spec: Spec) -> Task:
    """The task after one pass before the first round: what does not fit together is said now, in the user's words."""
    FlatModel(task.module)
    data = task.data
    few = data.train[data.partition.indices[:2]]
    inputs = data.prepare(few.inputs)
    module = deepcopy(task.module).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch_draws(0, "trial"), torch.no_grad():
            for parameter in module.parameters():  # away from the start, where some buffers are at rest
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            outputs = module(inputs)
            losses = task.loss(outputs, few.targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        shape = tuple(inputs.shape[1:])
        raise KeelError(f"model: fails on an input of shape {shape} with label {few.targets[0]} ({reason})") from error
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (len(few),):
        given = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise KeelError(
            f"loss: gives {given} for {len(few)} examples; accepted: one loss per example, as with reduction='none'"
        )
    positions = few.targets.dim()  # of a label: the example, and its place in a sequence
    if data.classes and (outputs.dim() != positions + 1 or outputs.shape[-1] < data.classes):
        raise KeelError(f"model: outputs of shape {tuple(outputs.shape[1:])} for {data.classes} classes")
    task = replace(task, moving=moving_buffers(module, before, spec.model.buffers))
    _try_one(task, module, spec)
    return task


def _try_one(task: Task, module: nn.Module, spec: Spec) -> None:
    """Whether the model can be trained on one example, if a minibatch of one will come: BatchNorm may not."""
    sizes, local, algorithm = task.data.partition.sizes, spec.local, spec.algorithm
    alone = (sizes == 1) | (local.batch == 1)
    if not local.drop_last:
        alone |= sizes % local.batch == 1
    if algorithm.probes or "full_gradient" in algorithm.observes:
        alone |= sizes % task.data.at_once == 1
    if not alone.any():
        return
    try:
        with torch_draws(0, "trial"), torch.no_grad():
            module(task.data.prepare(task.data.train[task.data.partition.indices[:1]].inputs))
    except (RuntimeError, ValueError) as error:
        client = int(np.argmax(alone))
        raise KeelError(
            f"model: cannot be trained on one example, which is all that a minibatch of client {client} has "
            f"({str(error).splitlines()[0]}); accepted: local.drop_last = true, another local.batch, or "
            "model.buffers = 'group_norm'"
        ) from error
