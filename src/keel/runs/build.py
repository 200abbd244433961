"""Assembles a run from its spec: the task, the sampler, the engine and the loop. The one place that does."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from keel import engines, registry
from keel.config.schema import CUSTOM, EngineSpec, LocalSpec, ServerSpec, Spec
from keel.core.client import LocalConfig, LocalTraining
from keel.core.devices import cores, find_device
from keel.core.diagnostics import Deviation, Drift
from keel.core.engine import Engine, Workload
from keel.core.examples import FederatedData, Partition
from keel.core.flat_model import Loss
from keel.core.loop import Loop, LoopSettings
from keel.core.observers import Observer
from keel.core.randomness import keyed_rng
from keel.core.sampling import SAMPLERS, Sampler
from keel.core.schedules import LearningRate
from keel.core.task import Task, default_loss
from keel.core.transforms import ChannelsLast, Layout
from keel.data import catalog
from keel.data.partition import partition_dataset
from keel.engines.ray_cluster import Cluster, in_ray_worker
from keel.errors import KeelError
from keel.runs.initial_model import initial_module
from keel.runs.task_checks import checked_task
from keel.settings import call_imported

VALIDATION_SHARE = 0.2

EngineFactory = Callable[[Workload, int], Engine]
"""A function of the workload and the number of workers that returns an engine."""


@dataclass(frozen=True)
class Training:
    """A spec with the loop that runs it."""

    spec: Spec
    loop: Loop
    workers: int
    device: torch.device


def build(
    spec: Spec,
    task: Task,
    *,
    workers: int | None = None,
    engine: EngineFactory | None = None,
    sampler: Sampler | None = None,
) -> Training:
    """The training that `spec` describes, on a task that was made for it.

    Args:
        workers: Processes to train with, instead of the spec's.
        engine: Makes the engine, instead of the one that the spec names.
        sampler: Instead of the one that the spec names.
    """
    requested = workers or spec.engine.workers
    cluster = None
    if engine is None and spec.engine.on_ray and not in_ray_worker():
        cluster = Cluster(spec.engine.address, spec.engine.gpus, requested or cores())
    try:
        device = find_device(spec.engine.where) if cluster is None else torch.device(spec.engine.where)
        workload = Workload(
            task, local_training(spec, task), spec.model.buffers == "local", spec.engine.compile, device
        )
        count = requested or (cores() if cluster is None else cluster.slots())
        sampler = sampler or make_sampler(spec, task.data.partition)
        if engine is None:
            chosen = engines.make_engine(spec.engine.name, workload, count, cluster)
        else:
            chosen = engines.make_user_engine("engine", engine, workload, count)
        loop = Loop(task, spec.algorithm, sampler, chosen, _loop_settings(spec), _observers(spec))
    except BaseException:  # a cluster that was joined has to be left
        if cluster is not None:
            cluster.leave()
        raise
    return Training(spec, loop, count, device)


def make_task(
    spec: Spec, *, module: nn.Module | None = None, data: FederatedData | None = None, loss: Loss | None = None
) -> Task:
    """The task of a spec. A module, data or loss that is passed replaces the one that the spec names."""
    data = load_data(spec) if data is None else data
    if spec.evaluation.on == "validation":
        data = hold_out_validation(data, spec.seed)
    if spec.algorithm.pooled:
        data = replace(data, partition=Partition.of([data.partition.indices]))
    module = initial_module(spec.model, spec.seed, data.input_shape, data.classes, module)
    if loss is not None and not callable(loss):
        raise KeelError(
            f"loss must be a function of outputs and targets that returns a loss per example (got {loss!r})"
        )
    layout = spec.engine.layout or _default_layout(data, module, spec.engine)
    if layout == "channels_last":
        if len(data.input_shape) != 3:
            shape = tuple(data.input_shape)
            raise KeelError(f"engine.layout = 'channels_last' requires images (got inputs of shape {shape})")
        data = replace(data, transform=ChannelsLast(data.transform))
    task = Task(module, data, loss or default_loss(data), layout=layout)
    return checked_task(task, spec) if data.is_local else task


def check_tasks(specs: Iterable[Spec]) -> None:
    """Make one task for each distinct data set and model of the specs, so that an error shows before the first run."""
    for spec in {(spec.data.model_dump_json(), spec.model.model_dump_json()): spec for spec in specs}.values():
        make_task(spec)


def load_data(spec: Spec) -> FederatedData:
    data = spec.data
    return partition_dataset(
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


def hold_out_validation(data: FederatedData, seed: int) -> FederatedData:
    """Replace the test examples by a fifth of each client's training examples, to select settings on."""
    partition, rng = data.partition, keyed_rng(seed, "validation")
    shuffled = partition.indices.copy()
    for first, end in pairwise(partition.offsets.tolist()):
        rng.shuffle(shuffled[first:end])
    cuts = (partition.sizes * VALIDATION_SHARE).astype(np.int64)
    rank = np.arange(len(shuffled)) - np.repeat(partition.offsets[:-1], partition.sizes)
    validation = rank < np.repeat(cuts, partition.sizes)
    chosen = shuffled[validation]
    if len(chosen) == 0:
        raise KeelError("evaluation.on = 'validation' requires a client with at least five examples; use 'test'")
    kept = Partition(shuffled[~validation], np.concatenate([[0], np.cumsum(partition.sizes - cuts)]))
    return replace(data, test=data.train[chosen], partition=kept, sha256=data.fingerprint())


def local_training(spec: Spec, task: Task) -> LocalTraining:
    """What a client of the run does, wherever it trains."""
    return LocalTraining(
        spec.algorithm, task.loss, local_config(spec.local), spec.seed, task.data.transform, task.data.chunk_size
    )


def local_config(local: LocalSpec) -> LocalConfig:
    return LocalConfig(
        local.epochs, local.steps, local.batch, local.drop_last, local.weight_decay, local.clip, local.precision
    )


def make_sampler(spec: Spec, partition: Partition) -> Sampler:
    make = registry.find("participation.sampler", spec.participation.sampler, SAMPLERS, "keel.samplers")
    arguments = {"sizes": partition.sizes, "size": spec.participation.cohort_size(partition.clients), "seed": spec.seed}
    sampler: Sampler = call_imported("participation.sampler", spec.participation.sampler, make, **arguments)
    check_sampler(sampler)
    return sampler


def check_sampler(sampler: Any) -> None:
    """Raise a KeelError unless the object has the attributes of a Sampler."""
    missing = [name for name in ("size", "clients", "period", "cohort") if not hasattr(sampler, name)]
    if missing:
        raise KeelError(f"sampler must have the attribute {missing[0]!r} (got {type(sampler).__name__})")


def _loop_settings(spec: Spec) -> LoopSettings:
    def learning_rate(side: LocalSpec | ServerSpec) -> LearningRate:
        return LearningRate(side.lr, side.schedule, side.decay, spec.rounds)

    return LoopSettings(
        seed=spec.seed,
        rounds=spec.rounds,
        local_lr=learning_rate(spec.local),
        server_lr=learning_rate(spec.server),
        evaluated=lambda round: spec.evaluation.due(round, spec.rounds),
        weighting=spec.server.weighting,
        local_buffers=spec.model.buffers == "local",
        server_ram=spec.memory.ram_gb * 1e9,
        state_precision=spec.memory.precision,
        state_keep=spec.memory.keep,
    )


def _observers(spec: Spec) -> list[Observer]:
    observers: list[Observer] = [Drift()] if spec.evaluation.drift else []
    return [*observers, Deviation(spec.evaluation.deviation)] if spec.evaluation.deviation else observers


def _default_layout(data: FederatedData, module: nn.Module, engine: EngineSpec) -> Layout:
    """channels_last for convolutions where the engine gains from it; decided by the task, never by a clock."""
    device = engine.where if engine.on_ray else find_device(engine.where).type
    images = len(data.input_shape) == 3 and any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    return "channels_last" if images and device == "cpu" and _one_client_at_a_time(engine.name) else "contiguous"


def _one_client_at_a_time(name: str) -> bool:
    return name in (engines.AUTO, CUSTOM) or engines.engine_kind(name).group == 1
