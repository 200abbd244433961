"""A sweep by Optuna: its sampler proposes the points, its pruner stops runs early, its SQLite file stores the study.

This is the one module that touches Optuna, its private `_trial_id` included.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config.schema import Spec, resolved_spec
from keel.core.records import PrimaryMetric, final_value, primary_metric
from keel.engines import cores
from keel.errors import KeelError
from keel.runs.build import make_task
from keel.runs.files import sqlite_address
from keel.runs.objects import RunObjects
from keel.runs.parallel import Executor, Job, ThisProcess, cluster_of, executor, result_of, run_one
from keel.runs.progress import ProgressCallback, RoundProgress, show_progress
from keel.runs.run import find_run
from keel.runs.search_space import Axis, Plan, Point, Range, name_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Outcome = dict[str, Any]
"""The end of a trial: the name of its state in Optuna, and its value."""
STUDY = "sweep"


def run_trials(
    plan: Plan, path: Path, quiet: bool, workers: int | None = None, objects: RunObjects | None = None
) -> list[Point]:
    """Run the trials that are left, and return the points of all trials, each once, in the order of their proposal."""
    optuna = _optuna()
    primary = _check(plan, path, objects)
    path.mkdir(parents=True, exist_ok=True)
    total = plan.search.points or 0
    with _storage(path) as storage:
        direction = "maximize" if primary.maximize else "minimize"
        study = optuna.create_study(
            storage=storage, study_name=STUDY, load_if_exists=True, direction=direction, pruner=_pruner(plan)
        )
        _same_search(study, plan, path)
        before = _proposed(study, plan)
        study.sampler = _sampler(plan, len(before))
        left = total - sum(trial.state.is_finished() for trial in before)
        if left > 0:
            runs = total * len(plan.seeds)
            names = [f"point {number} seed {seed}" for number in range(total) for seed in plan.seeds]
            with show_progress([f"{total} points"] * runs, [plan.base.rounds] * runs, quiet, names) as watch:
                _Trials(plan, path, study, total, watch, workers or cores(), objects).run()
        tried = [_point(trial) for trial in _proposed(study, plan) if trial.state.is_finished()]
        return list({name_of(point): point for point in tried}.values())


class _Trials:
    """Runs as many trials at a time as there are cores. A point that is proposed again shares the earlier result."""

    def __init__(
        self,
        plan: Plan,
        path: Path,
        study: "Study",
        total: int,
        watch: ProgressCallback,
        workers: int,
        objects: RunObjects | None,
    ):
        self.plan, self.path, self.study, self.total, self.watch = plan, path, study, total, watch
        self.workers, self.objects = workers, objects
        self.space = {key: _distribution(axis) for key, axis in plan.axes.items()}
        self.ended: dict[str, Outcome] = {}
        self.running: dict[str, tuple[Future[Outcome | None], list[int]]] = {}

    def run(self) -> None:
        trials, interrupted = _proposed(self.study, self.plan), []
        for trial in trials:
            if trial.state.is_finished():
                self.ended[name_of(_point(trial))] = {"value": trial.value, "state": trial.state.name}
                self._show(trial.number)
            else:
                interrupted.append(trial)
        cluster = cluster_of([self.plan.base]) if self.objects is None else None
        slots = self.workers if cluster is None else cluster.slots()
        proposed, concurrent = len(trials), min(slots, self.total)
        work = _run_trial if self.objects is None else partial(_run_point, self.plan, self.path.absolute())
        with executor(concurrent, self.watch, work, cluster, self.path, self.objects) as pool:
            while True:
                while len(self.running) < concurrent and (interrupted or proposed < self.total):
                    if interrupted:
                        trial = interrupted.pop(0)
                    else:
                        trial, proposed = self._propose(), proposed + 1
                    self._start(pool, trial, max(1, slots // concurrent) if cluster is None else 1)
                if not self.running:
                    return
                pool.wait([future for future, _ in self.running.values()], until=any)
                self._collect()

    def _propose(self) -> "FrozenTrial":
        number = self.study.ask(self.space).number
        return self.study.get_trials(deepcopy=False)[number]

    def _start(self, pool: Executor | ThisProcess, trial: "FrozenTrial", workers: int) -> None:
        point = _point(trial)
        name = name_of(point)
        if name in self.ended:
            self._finish(trial.number, self.ended[name])
        elif name in self.running:
            self.running[name][1].append(trial.number)
        else:
            folder = self.path.absolute()  # a job on a cluster has another working folder
            runs: Any = point  # which a forked worker turns into runs with the plan that it inherits
            if self.objects is None:
                runs = [(spec.model_dump(exclude_none=True), path) for spec, path in self.plan.runs(point, folder)]
            reported = max(trial.intermediate_values, default=0)
            rest = (folder, trial._trial_id, _pruner(self.plan), reported, workers)
            self.running[name] = pool.submit(self._first_line(trial.number), runs, *rest), [trial.number]

    def _collect(self) -> None:
        for name, (future, numbers) in list(self.running.items()):
            if future.done():
                del self.running[name]
                self.ended[name] = result_of(future)
                for number in numbers:
                    self._finish(number, self.ended[name])

    def _finish(self, number: int, outcome: Outcome) -> None:
        from optuna.trial import TrialState

        state = TrialState[outcome["state"]]
        self.study.tell(number, outcome["value"] if state == TrialState.COMPLETE else None, state)
        self._show(number)

    def _show(self, number: int) -> None:
        """Count all rounds of an ended trial as done, also those that a pruner skipped."""
        for k in range(len(self.plan.seeds)):
            self.watch(self._first_line(number) + k, {"round": self.plan.base.rounds})

    def _first_line(self, number: int) -> int:
        """The progress line of a trial's first run. Trial numbers can exceed the points if fewer are requested."""
        return number % self.total * len(self.plan.seeds)


def _run_trial(line: int, runs: list[tuple[dict[str, Any], Path]], *rest: Any) -> Outcome:
    """Run a trial in a worker that receives its specs as tables."""
    return _run_jobs(line, [Job(resolved_spec(table), folder) for table, folder in runs], *rest)


def _run_point(plan: Plan, folder: Path, line: int, point: Point, *rest: Any) -> Outcome:
    """Run a trial in a worker that has inherited the plan."""
    return _run_jobs(line, [Job(*run) for run in plan.runs(point, folder)], *rest)


def _run_jobs(
    line: int,
    jobs: list[Job],
    path: Path,
    trial_id: int,
    pruner: "BasePruner | None",
    reported: int,
    workers: int,
) -> Outcome:
    """Run the jobs of a trial, one per seed, one after the other, unless the pruner stops it.

    Its steps are rounds, counted through all seeds, so that the pruner compares the same seed at the same round.

    Args:
        reported: The last step that was reported before an interruption.
    """
    import optuna

    scores: list[float] = []
    with _storage(path) as storage:
        trial = optuna.trial.Trial(optuna.load_study(study_name=STUDY, storage=storage, pruner=pruner), trial_id)
        for k, job in enumerate(jobs):
            offset = k * job.spec.rounds

            def enough(progress: RoundProgress, spec: Spec = job.spec, offset: int = offset) -> bool:
                step = offset + progress["round"]
                due = progress["round"] % spec.evaluation.every == 0 and progress["round"] < spec.rounds
                if pruner is None or not due or "value" not in progress or step <= reported:
                    return False
                trial.report(progress["value"], step)
                return trial.should_prune()

            summary = run_one(line + k, job, workers, enough)
            worst = worst_value(primary_metric(summary))
            if summary["status"] == "diverged":
                return {"value": worst, "state": "COMPLETE"}
            if summary["status"] == "interrupted":
                return {"value": None, "state": "PRUNED"}
            score = final_value(summary)
            scores.append(worst if score is None else score)
    return {"value": sum(scores) / len(scores), "state": "COMPLETE"}


def worst_value(primary: PrimaryMetric) -> float:
    """The value of a point that diverged: no other is worse."""
    if primary.is_fraction:
        return 0.0 if primary.maximize else 1.0
    return -inf if primary.maximize else inf


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise KeelError("search.method = 'optuna' requires Optuna: pip install 'keel-fl[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _storage(path: Path) -> Iterator[Any]:
    """The study's file. Several processes write to it, one at a time."""
    from optuna.storages import RDBStorage

    storage = RDBStorage(sqlite_address(path / "sweep.db"), engine_kwargs={"connect_args": {"timeout": 60}})
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _check(plan: Plan, path: Path, objects: RunObjects | None) -> PrimaryMetric:
    """Check that the first possible point can be run, before anything is written, and return its primary metric."""
    first = {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in plan.axes.items()}
    for spec, folder in plan.runs(first, path):
        find_run(spec, folder)
    spec = plan.specs(first)[0]
    return make_task(spec, **({} if objects is None else objects.of_task(spec.seed))).primary


def _same_search(study: "Study", plan: Plan, path: Path) -> None:
    kept = {key: value for key, value in plan.described().items() if key not in ("points", "sampler")}
    search = json.dumps({**kept, "spec": plan.base.identity}, sort_keys=True)
    if study.user_attrs.setdefault("search", search) != search:
        raise KeelError(f"out: {str(path)!r} holds another search; use another folder (--out) or remove it")
    study.set_user_attr("search", search)


def _proposed(study: "Study", plan: Plan) -> "list[FrozenTrial]":
    """The trials with a complete point; a kill can interrupt the last proposal."""
    return [trial for trial in study.get_trials() if trial.params.keys() == plan.axes.keys()]


def _point(trial: "FrozenTrial") -> Point:
    """The point of a trial. Choices are stored as JSON, since Optuna does not support lists."""
    return {key: json.loads(value) if isinstance(value, str) else value for key, value in trial.params.items()}


def _distribution(axis: Axis) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, list):
        return CategoricalDistribution([json.dumps(value) for value in axis])
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return IntDistribution(axis.low, axis.high, log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _sampler(plan: Plan, proposed: int) -> "BaseSampler":
    """The sampler, with a new seed after every interruption: with the old one it would repeat its proposals."""
    from optuna import samplers

    kind = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "cmaes": samplers.CmaEsSampler,
        "gp": samplers.GPSampler,
    }[plan.search.sampler or "tpe"]
    return kind(seed=plan.base.seed + proposed)


def _pruner(plan: Plan) -> "BasePruner | None":
    """The pruner by name. None of them judges a run in its first tenth, where the metric is not yet informative."""
    from optuna import pruners

    rounds = plan.base.rounds
    first = max(plan.base.evaluation.every, rounds // 10)
    match plan.search.pruner:
        case "median":
            return pruners.MedianPruner(n_warmup_steps=first)
        case "halving":
            return pruners.SuccessiveHalvingPruner(first)
        case "hyperband":
            return pruners.HyperbandPruner(first, rounds * len(plan.seeds))
        case _:
            return None
