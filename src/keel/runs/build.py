"""Assembles a run from its spec: the task, the sampler, the engine and the loop. The one place that does."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from keel import engines, registry
from keel.algorithms import gradients_per_step, messages_of
from keel.config.schema import CUSTOM, EngineSpec, LocalSpec, ServerSpec, Spec
from keel.core.availability import Availability, Diurnal
from keel.core.choices import Layout
from keel.core.client import LocalConfig, LocalTraining
from keel.core.devices import cores, find_device, same_kind
from keel.core.diagnostics import Deviation, Drift
from keel.core.engine import Engine, Workload
from keel.core.examples import FederatedData, Partition
from keel.core.flat_model import FlatModel, Loss
from keel.core.loop import Loop, LoopSettings
from keel.core.mechanisms import ServerMean
from keel.core.observers import Observer
from keel.core.optimizer_trial import MakeOptimizer
from keel.core.records import PrimaryMetric
from keel.core.sampling import SAMPLERS, Sampler
from keel.core.schedules import LearningRate
from keel.core.selection import KeepBest
from keel.core.stopping import StopRules
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng
from keel.core.transforms import ChannelsLast
from keel.data import catalog
from keel.data.partition import partition_dataset
from keel.engines.ray_cluster import Cluster, in_ray_worker
from keel.errors import KeelError
from keel.privacy.noise import Draw
from keel.privacy.plan import PrivacyObserver, PrivacyPlan, robust_mean, with_client_part
from keel.runs.compression import compression_of
from keel.runs.held_out import hold_out_clients, hold_out_validation
from keel.runs.initial_model import initial_module
from keel.runs.losses import find_loss
from keel.runs.metrics import Metrics, make_metrics
from keel.runs.optimizers import make_optimizer
from keel.runs.task_checks import checked_task
from keel.settings import call_imported

log = logging.getLogger(__name__)

EngineFactory = Callable[[Workload, int], Engine]
"""A function of the workload and the number of workers that returns an engine."""


@dataclass(frozen=True)
class Training:
    """A spec with the loop that runs it."""

    spec: Spec
    loop: Loop
    workers: int
    device: torch.device
    privacy: PrivacyPlan | None = None


def build(
    spec: Spec,
    task: Task,
    *,
    workers: int | None = None,
    engine: EngineFactory | None = None,
    sampler: Sampler | None = None,
    optimizer: MakeOptimizer | None = None,
    secret: Draw | None = None,
) -> Training:
    """The training that `spec` describes, on a task that was made for it.

    Args:
        workers: Processes to train with, instead of the spec's.
        engine: Makes the engine, instead of the one that the spec names.
        sampler: Instead of the one that the spec names.
        optimizer: Makes the local optimiser, instead of the one that the spec names.
        secret: Draws the server's noise where clients know the seed.
    """
    if spec.algorithm.personalised and spec.evaluation.clients is None:
        log.warning(
            "%s trains personal models: set evaluation.clients to measure them; accuracy is that of the server's model",
            spec.algorithm.title,
        )
    requested = workers or spec.engine.workers
    cluster = None
    if engine is None and spec.engine.on_ray and not in_ray_worker():
        cluster = Cluster(spec.engine.address, spec.engine.gpus, requested or cores())
    try:
        device = find_device(spec.engine.where) if cluster is None else torch.device(spec.engine.where)
        devices = same_kind(device) if cluster is None and not in_ray_worker() else (device,)
        sampler = sampler or make_sampler(spec, task.data.partition)
        privacy = privacy_plan(spec, task, sampler)
        local = local_training(spec, task, optimizer)
        workload = Workload(
            task,
            local if privacy is None else with_client_part(local, privacy.settings, privacy.noise, task),
            spec.model.buffers == "local",
            spec.engine.compile,
            device,
            devices if len(devices) > 1 else (),
        )
        count = requested or (cores() if cluster is None else cluster.slots())
        if engine is None:
            chosen = engines.make_engine(spec.engine.name, workload, count, cluster)
        else:
            chosen = engines.make_user_engine("engine", engine, workload, count)
        observers = [*_observers(spec, task), *([] if privacy is None else [PrivacyObserver(privacy)])]
        mean = _server_mean(spec, privacy, secret)
        loop = Loop(task, workload.local, sampler, chosen, _loop_settings(spec), observers, mean)
    except BaseException:  # a cluster that was joined has to be left
        if cluster is not None:
            cluster.leave()
        raise
    return Training(spec, loop, count, device, privacy)


def privacy_plan(spec: Spec, task: Task, sampler: Sampler) -> PrivacyPlan | None:
    """The privacy of a run; None if it has none."""
    if spec.privacy is None:
        return None
    sizes, config = task.data.partition.sizes.tolist(), local_config(spec.local)
    if spec.privacy.mechanism == "example" and task.moving:
        raise KeelError(
            f"privacy.mechanism = 'example' requires a model that does not mix examples (training changes the buffer "
            f"{task.moving[0]}); set model.buffers = 'group_norm'"
        )
    if spec.privacy.mechanism != "example":
        _check_clippable(spec, task)
    plan = PrivacyPlan(
        spec.privacy,
        sampler,
        spec.participation.sampler,
        spec.rounds,
        spec.local.batch,
        [config.count(size) for size in sizes],
        sizes,
        gradients_per_step(spec.algorithm, FlatModel(task.module).sizes),
    )
    protected = max(sizes) if spec.privacy.mechanism == "example" else len(sizes)
    if spec.privacy.delta * protected >= 1:
        log.warning(
            "privacy.delta = %g is not below 1 / %d: a mechanism that publishes one %s at random would pass; use less",
            spec.privacy.delta,
            protected,
            "example" if spec.privacy.mechanism == "example" else "client",
        )
    if plan.allowed_rounds < spec.rounds:
        log.info("the privacy budget allows %d of %d rounds", plan.allowed_rounds, spec.rounds)
    return plan


def _check_clippable(spec: Spec, task: Task) -> None:
    """Raise a KeelError if a report has integers, which have no norm and cannot be noised."""
    model = FlatModel(task.module)
    with keyed_torch_rng(spec.seed, "trial"):
        report = messages_of(spec.algorithm, torch.zeros_like(model.weights), model.sizes)[1][-1]
    for name, value in report.items():
        if not value.is_floating_point():
            raise KeelError(
                f"privacy.mechanism does not support {type(spec.algorithm).__name__}: {name!r} of its report has the "
                f"type {value.dtype}, which cannot be clipped; report a floating-point tensor"
            )


def _server_mean(spec: Spec, privacy: PrivacyPlan | None, secret: Draw | None) -> ServerMean | None:
    if spec.server.mean is not None:
        return robust_mean(spec.server.mean, spec.server.trim)
    return None if privacy is None else privacy.mean(secret)


def make_task(
    spec: Spec,
    *,
    module: nn.Module | None = None,
    data: FederatedData | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics | None = None,
) -> Task:
    """The task of a spec. A module, data, loss or metrics that are passed replace those that the spec names."""
    data = load_data(spec) if data is None else data
    if spec.evaluation.on == "validation":
        data = hold_out_validation(data, spec.seed)
    tests = None
    if spec.evaluation.clients is not None:
        data, tests = hold_out_clients(data, spec.evaluation, spec.seed, spec.local.lr)
    if spec.algorithm.pooled:
        data = replace(data, partition=Partition.of([data.partition.indices]), client_names=None)
    module = initial_module(spec.model, spec.seed, data.input_shape, data.outputs, module)
    layout = spec.engine.layout or _default_layout(data, module, spec.engine)
    if layout == "channels_last":
        if len(data.input_shape) != 3:
            shape = tuple(data.input_shape)
            raise KeelError(f"engine.layout = 'channels_last' requires images (got inputs of shape {shape})")
        data = replace(data, transform=ChannelsLast(data.transform))
    measured, primary = make_metrics(
        (spec.evaluation.metrics or ()) if metrics is None else metrics, data, spec.evaluation
    )
    task = Task(
        module, data, find_loss(loss or spec.local.loss, data), (), layout, measured, primary, client_tests=tests
    )
    _check_stop_target(spec, task.primary)
    return checked_task(task, spec) if data.is_local else task


def _check_stop_target(spec: Spec, metric: PrimaryMetric) -> None:
    target = None if spec.stop is None else spec.stop.target
    if target is not None and metric.is_fraction and not 0 <= target <= 1:
        raise KeelError(f"stop.target must be from 0 to 1 for {metric.label}, as in 0.8 (got {target:g})")


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
        alpha=data.alpha,
        classes_per_client=data.classes_per_client,
        shards_per_client=data.shards_per_client,
        noise=data.noise,
        min_examples=data.min_examples,
        max_examples=data.max_examples,
        test_examples=data.test_examples,
    )


def local_training(spec: Spec, task: Task, optimizer: MakeOptimizer | None = None) -> LocalTraining:
    """What a client of the run does, wherever it trains."""
    mechanisms, downlink = compression_of(spec, task)
    return LocalTraining(
        spec.algorithm,
        task.loss,
        local_config(spec.local),
        spec.seed,
        task.data.transform,
        task.data.chunk_size,
        make_optimizer(spec.local, task.module, optimizer),
        mechanisms=mechanisms,
        downlink=downlink,
    )


def local_config(local: LocalSpec) -> LocalConfig:
    return LocalConfig(
        local.epochs, local.steps, local.batch, local.drop_last, local.clip, local.precision, local.microbatch
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
        return LearningRate(side.lr, side.schedule, side.decay, spec.rounds, side.warmup)

    return LoopSettings(
        seed=spec.seed,
        rounds=spec.rounds,
        local_lr=learning_rate(spec.local),
        server_lr=learning_rate(spec.server),
        evaluated=lambda round: spec.evaluation.due(round, spec.rounds),
        weighting=spec.server.weighting,
        largest_weight=spec.server.largest_weight,
        clip=spec.server.clip,
        local_buffers=spec.model.buffers == "local",
        server_ram=spec.memory.ram_gb * 1e9,
        state_precision=spec.memory.precision,
        state_keep=spec.memory.keep,
        availability=make_availability(spec),
    )


def make_availability(spec: Spec) -> Availability | None:
    """Which clients answer, by the spec's `[availability]` table; None if all do."""
    table = spec.availability
    if table is None:
        return None
    diurnal = None
    if table.diurnal_rounds is not None:
        diurnal = Diurnal(table.diurnal_rounds, table.diurnal_least or 0.0, table.diurnal_spread or 0.0)
    return Availability(spec.seed, table.dropout or 0.0, diurnal, table.deadline, table.step_seconds, spec.network)


def stop_rules(training: Training) -> StopRules:
    """The rules of the spec's `[stop]` table, and its privacy budget."""
    spec, privacy = training.spec, training.privacy
    private = None
    if privacy is not None and privacy.allowed_rounds < spec.rounds:
        private = privacy.allowed_rounds
    if spec.stop is None:
        return StopRules(private_rounds=private)
    fields = spec.stop.model_dump(exclude={"gigabytes"}, exclude_none=True)
    return StopRules(
        **fields, bytes=None if spec.stop.gigabytes is None else spec.stop.gigabytes * 1e9, private_rounds=private
    )


def _observers(spec: Spec, task: Task) -> list[Observer]:
    evaluation, observers = spec.evaluation, list[Observer]()
    if evaluation.drift:
        observers.append(Drift())
    if evaluation.deviation:
        observers.append(Deviation(evaluation.deviation))
    if evaluation.select:
        observers.append(KeepBest(task.primary))
    return observers


def _default_layout(data: FederatedData, module: nn.Module, engine: EngineSpec) -> Layout:
    """channels_last for convolutions where the engine gains from it; decided by the task, never by a clock."""
    device = engine.where if engine.on_ray else find_device(engine.where).type
    images = len(data.input_shape) == 3 and any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    return "channels_last" if images and device == "cpu" and _one_client_at_a_time(engine.name) else "contiguous"


def _one_client_at_a_time(name: str) -> bool:
    return name in (engines.AUTO, CUSTOM) or engines.engine_kind(name).group == 1
