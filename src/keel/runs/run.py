"""keel.run and keel.resume: an experiment in a folder."""

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from keel import engines
from keel.algorithms import Algorithm
from keel.config.schema import CUSTOM, Spec, algorithm_table, partition_label, resolved_spec
from keel.core.examples import FederatedData
from keel.core.flat_model import Loss
from keel.core.observers import Hook, Observer, as_observer
from keel.core.optimizer_trial import MakeOptimizer
from keel.core.sampling import Sampler
from keel.data.statistics import client_statistics
from keel.errors import KeelError
from keel.runs.build import EngineFactory, Training, build, make_task
from keel.runs.checkpoint import check_dtypes
from keel.runs.environment import SAME_BITS, environment_of, versions
from keel.runs.execute import execute
from keel.runs.folder import RunFolder
from keel.runs.metrics import Metrics
from keel.runs.model_record import model_record
from keel.runs.passed import by_name, check_resumed, objects_only, spec_of
from keel.runs.resources import Footprint, check_footprint
from keel.runs.result import Run, ended_run
from keel.runs.same_task import check_same_task
from keel.runs.tracking import check_trackers
from keel.runs.verify import damages


def run(
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    *,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics | None = None,
    sampler: Sampler | None = None,
    engine: EngineFactory | None = None,
    optimizer: MakeOptimizer | str | None = None,
    out: str | Path | None = None,
    title: str | None = None,
    hooks: Sequence[Observer | Hook] = (),
    workers: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    announce: Callable[[Footprint], None] | None = None,
) -> Run:
    """Run the experiment that `spec` describes into a new folder.

    Args:
        spec: A Spec, a table, or the path of a TOML file. What it leaves out has defaults.
        model: A module; its current parameters are the initial ones.
        data: Federated data, as from keel.federate.
        algorithm: An algorithm with its hyper-parameters.
        loss: A name ("cross_entropy", "sequence_cross_entropy", "mse", "mae", "huber", "bce", or "model" for the
            model's own loss), or a function of outputs and targets that returns one loss per example or their mean. By
            default it suits the targets.
        metrics: What is measured at each evaluation: names as of torchmetrics ("f1", "auroc", "mae", ...), torchmetrics
            objects, or functions of all outputs and targets; a mapping gives them names. The first is the primary
            metric, by which runs are compared. By default accuracy, or the loss where targets are not classes.
        sampler: An object that samples the cohorts (see keel.core.sampling.Sampler).
        engine: A function of a keel.core.engine.Workload and a number of workers that returns the engine.
        optimizer: The optimiser of local steps: a name ("sgd", "adam", "adamw", "adagrad", "rmsprop"), a class of
            torch.optim, or a function of parameters, `lr` and `weight_decay` that makes one. By default SGD.
        out: The folder; without it a new one below runs/.
        title: The method's name in tables and reports; without it the algorithm's.
        hooks: keel.Observer instances, or functions hook(record, state, seconds) that are called after each round.
        workers: Processes to train with.
        stop: Called after each round; True interrupts the run as Ctrl-C does, and keel.resume continues it. The
            rules that end a run with a result are the spec's table `stop`.
        announce: Called with the memory and disk footprint before anything is written.

    Raises:
        KeelError: The spec, the arguments or the data are not valid, or the run does not fit on this machine.
    """
    hooks = [as_observer(hook) for hook in hooks]
    passed = by_name(model, data, algorithm, loss, metrics, sampler, engine, optimizer)
    spec = spec_of(spec, passed)
    check_trackers(spec.tracking)
    task = make_task(spec, module=model, data=data, loss=objects_only(loss), metrics=objects_only(metrics))
    training = build(spec, task, workers=workers, engine=engine, sampler=sampler, optimizer=objects_only(optimizer))
    with closing(training.loop.engine):
        check_dtypes(training.loop.algorithm.init_server(training.loop.initial))
        footprint = check_footprint(training, Path("runs" if out is None else out))
        if announce is not None:
            announce(footprint)
        folder = create_folder(training, None if out is None else Path(out), {} if title is None else {"title": title})
        with folder.locked():
            state = training.loop.start(folder.clients_file)
            return execute(folder, training, state, hooks, stop)


def resume(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics | None = None,
    sampler: Sampler | None = None,
    engine: EngineFactory | None = None,
    optimizer: MakeOptimizer | str | None = None,
    address: str | None = None,
    hooks: Sequence[Observer | Hook] = (),
    workers: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Continue an interrupted run; the result is bit-identical to an uninterrupted run. An ended run does not change.

    Args:
        path: The run's folder.
        model, data, algorithm, loss, metrics, sampler, engine, optimizer: What was passed to keel.run has to be passed
            again, and is checked to be the same where it can be.
        address: A Ray cluster to continue on.
        hooks, workers, stop: As in keel.run.
    """
    hooks = [as_observer(hook) for hook in hooks]
    folder = RunFolder.open(Path(path))
    table, environment = folder.table, folder.environment
    recorded = {"device": environment.get("device", "cpu"), "layout": environment.get("layout")}
    engine_table = recorded | _resumed_engine(folder, table.get("engine", {}).get("name"), address)
    passed = by_name(model, data, algorithm, loss, metrics, sampler, engine, optimizer)
    check_resumed(passed, folder)
    spec = folder.spec if algorithm is None else resolved_spec({**table, "algorithm": algorithm})
    check_trackers(spec.tracking)
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update=engine_table)})
    with folder.locked():
        folder.check_places()
        started = _with_recorded_init(spec, folder)
        task = make_task(started, module=model, data=data, loss=objects_only(loss), metrics=objects_only(metrics))
        training = build(spec, task, workers=workers, engine=engine, sampler=sampler, optimizer=objects_only(optimizer))
        loop = training.loop
        with closing(loop.engine):
            check_same_task(folder, loop)
            if folder.ended:
                if found := damages(folder):
                    raise found[0]
                return ended_run(folder, training, folder.final_state())
            state = folder.restore(loop.client_states(folder.clients_file)) or loop.start(folder.clients_file)
            return execute(folder, training, state, hooks, stop)


def _resumed_engine(folder: RunFolder, requested: str | None, address: str | None) -> dict[str, Any]:
    """The fields of the engine with which a run continues: the one it started with, or its equal on a cluster."""
    if requested == CUSTOM:
        return {"name": CUSTOM}
    kind = engines.engine_kind(folder.engine)
    if kind.remote:
        raise KeelError(
            f"run: {str(folder.path)!r} belongs to a federation; resume it with flwr run and the same federation.out"
        )
    if address is not None:
        return {"address": address, "name": engines.cluster_engine(folder.engine)}
    if not kind.on_cluster:  # a run that a job on a cluster started continues without the cluster
        return {"name": folder.engine, "address": None, "gpus": None}
    return {"name": folder.engine}


def _with_recorded_init(spec: Spec, folder: RunFolder) -> Spec:
    """The spec whose initial weights are those in the folder: the file `model.init` may have changed or be gone."""
    if spec.model.init is None or not folder.initial_file.is_file():
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"init": str(folder.initial_file)})})


def find_run(spec: Spec, path: Path) -> RunFolder | None:
    """The folder of the run of `spec` at `path`, ended or not; None where nothing exists.

    Raises:
        KeelError: `path` holds the run of another spec, or of another version.
    """
    if not path.exists():
        return None
    folder = RunFolder.open(path)
    if not _is_run_of(folder, spec):
        raise KeelError(f"out: {str(path)!r} holds a run of another spec; use another folder (--out) or remove it")
    here, recorded = dict(versions()), dict(folder.environment)
    for name in SAME_BITS:
        if recorded[name] != here[name]:
            raise KeelError(f"out: {str(path)!r} was made by another version ({name}); use another folder")
    return folder


def _is_run_of(folder: RunFolder, spec: Spec) -> bool:
    table = folder.table
    if table["algorithm"]["name"] != CUSTOM:
        return folder.spec.identity == spec.identity
    same_algorithm = table["algorithm"] == algorithm_table(spec.algorithm)  # it cannot be found by its name
    return same_algorithm and resolved_spec({**table, "algorithm": spec.algorithm}).identity == spec.identity


def create_folder(training: Training, path: Path | None, more: Mapping[str, Any] | None = None) -> RunFolder:
    """A new run folder at `path`, or at an unused name below runs/. `more` is added to its environment."""
    spec = training.spec
    environment: Any = {**environment_of(training), **(more or {})}
    statistics = {**client_statistics(training.loop.task.data), "split": partition_label(spec.data)}
    model = model_record(training)
    if path is not None:
        try:
            return RunFolder.create(path, spec, environment, statistics, model)
        except OSError as error:
            if not _is_taken(error):
                raise
            raise KeelError(f"out: {str(path)!r} exists; use a new folder, or keel resume {path}") from None
    for number in count(1):
        unused = Path("runs") / (spec.label + f"-{number}" * (number > 1))
        try:
            return RunFolder.create(unused, spec, environment, statistics, model)
        except OSError as error:
            if not _is_taken(error):
                raise
    raise AssertionError("count() does not end")


def _is_taken(error: OSError) -> bool:
    """Whether a folder could not be made since one exists, perhaps made this moment by another process."""
    return isinstance(error, FileExistsError) or error.errno == errno.ENOTEMPTY
