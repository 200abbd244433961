"""A sweep by Optuna: its sampler proposes the points, its pruner ends runs early, its SQLite file keeps the study."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.engines import cores
from keel.errors import KeelError
from keel.rounds import Record
from keel.runs.batch import Crew, cluster_of, crew, run_one
from keel.runs.folder import sqlite_address
from keel.runs.run import existing
from keel.runs.search import Axis, Plan, Point, Range, name_of
from keel.runs.spec import Spec, resolved_spec
from keel.task import check_tasks
from keel.terminal import Watcher, watching

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Outcome = dict[str, Any]
"""How a trial ended: the name of its state for Optuna, and its value."""
STUDY = "sweep"
WORST = 0.0
"""What a point that diverged is worth: no accuracy is below."""


def run_trials(plan: Plan, path: Path, quiet: bool) -> list[Point]:
    """The points that were tried, each once, in the order in which they were proposed."""
    optuna = _optuna()
    _check(plan, path)
    path.mkdir(parents=True, exist_ok=True)
    total = plan.search.points or 0
    with _storage(path) as storage:
        study = optuna.create_study(
            storage=storage, study_name=STUDY, load_if_exists=True, direction="maximize", pruner=_pruner(plan)
        )
        _same_search(study, plan, path)
        before = _proposed(study, plan)
        study.sampler = _sampler(plan, len(before))
        left = total - sum(trial.state.is_finished() for trial in before)
        if left > 0:
            runs = total * len(plan.seeds)
            names = [f"point {number} seed {seed}" for number in range(total) for seed in plan.seeds]
            with watching([f"{total} points"] * runs, [plan.base.rounds] * runs, quiet, names) as watch:
                _Trials(plan, path, study, total, watch).run()
        tried = [_point(trial) for trial in _proposed(study, plan) if trial.state.is_finished()]
        return list({name_of(point): point for point in tried}.values())


class _Trials:
    """Keeps as many trials under way as there are cores. A point that is proposed again shares what it gave before."""

    def __init__(self, plan: Plan, path: Path, study: "Study", total: int, watch: Watcher):
        self.plan, self.path, self.study, self.total, self.watch = plan, path, study, total, watch
        self.space = {key: _distribution(axis) for key, axis in plan.axes.items()}
        self.ended: dict[str, Outcome] = {}
        self.running: dict[str, tuple[Future[Outcome], list[int]]] = {}

    def run(self) -> None:
        trials, stopped = _proposed(self.study, self.plan), []
        for trial in trials:
            if trial.state.is_finished():
                self.ended[name_of(_point(trial))] = {"value": trial.value, "state": trial.state.name}
                self._show(trial.number)
            else:
                stopped.append(trial)
        cluster = cluster_of([self.plan.base])
        room = cores() if cluster is None else cluster.slots()
        asked, at_once = len(trials), min(room, self.total)
        with crew(at_once, self.watch, cluster, self.path) as hands:
            while True:
                while len(self.running) < at_once and (stopped or asked < self.total):
                    if stopped:
                        trial = stopped.pop(0)
                    else:
                        trial, asked = self._ask(), asked + 1
                    self._begin(hands, trial, max(1, room // at_once) if cluster is None else 1)
                if not self.running:
                    return
                hands.follow([future for future, _ in self.running.values()], enough=any)
                self._collect()

    def _ask(self) -> "FrozenTrial":
        number = self.study.ask(self.space).number
        return self.study.get_trials(deepcopy=False)[number]

    def _begin(self, hands: Crew, trial: "FrozenTrial", workers: int) -> None:
        point = _point(trial)
        name = name_of(point)
        if name in self.ended:
            self._tell(trial.number, self.ended[name])
        elif name in self.running:
            self.running[name][1].append(trial.number)
        else:
            folder = self.path.absolute()  # a slot of a cluster is in another folder
            runs = [(spec.model_dump(exclude_none=True), path) for spec, path in self.plan.runs(point, folder)]
            seen = max(trial.intermediate_values, default=0)
            rest = (folder, trial._trial_id, _pruner(self.plan), seen, workers)
            self.running[name] = hands.submit(_try, self._first_line(trial.number), runs, *rest), [trial.number]

    def _collect(self) -> None:
        for name, (future, numbers) in list(self.running.items()):
            if future.done():
                del self.running[name]
                self.ended[name] = future.result()
                for number in numbers:
                    self._tell(number, self.ended[name])

    def _tell(self, number: int, outcome: Outcome) -> None:
        from optuna.trial import TrialState

        state = TrialState[outcome["state"]]
        self.study.tell(number, outcome["value"] if state == TrialState.COMPLETE else None, state)
        self._show(number)

    def _show(self, number: int) -> None:
        """All rounds of a trial count as done when it has ended, also those that were not run."""
        for k in range(len(self.plan.seeds)):
            self.watch(self._first_line(number) + k, {"round": self.plan.base.rounds})

    def _first_line(self, number: int) -> int:
        """Where the watcher counts the first run of a trial; numbers go beyond the points when fewer are asked for."""
        return number % self.total * len(self.plan.seeds)


def _try(
    line: int,
    runs: list[tuple[dict[str, Any], Path]],
    path: Path,
    trial_id: int,
    pruner: "BasePruner | None",
    seen: int,
    workers: int,
) -> Outcome:
    """A worker's trial: a run for each seed, one after the other, until the pruner has seen enough.

    Its steps are rounds, counted through all seeds: what is compared is the same seed at the same round.
    """
    import optuna

    scores: list[float] = []
    with _storage(path) as storage:
        trial = optuna.trial.Trial(optuna.load_study(study_name=STUDY, storage=storage, pruner=pruner), trial_id)
        for k, (table, folder) in enumerate(runs):
            spec = resolved_spec(table)
            offset = k * spec.rounds

            def enough(record: Record, spec: Spec = spec, offset: int = offset) -> bool:
                step = offset + record["round"]
                due = record["round"] % spec.evaluation.every == 0 and record["round"] < spec.rounds
                if pruner is None or not due or "accuracy" not in record or step <= seen:
                    return False
                trial.report(record["accuracy"], step)
                return trial.should_prune()

            summary = run_one(line + k, spec, folder, workers, enough)
            if summary["status"] == "diverged":
                return {"value": WORST, "state": "COMPLETE"}
            if summary["status"] == "interrupted":
                return {"value": None, "state": "PRUNED"}
            scores.append(summary["accuracy"])
    return {"value": sum(scores) / len(scores), "state": "COMPLETE"}


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise KeelError("search.method: 'optuna' needs Optuna; accepted: pip install 'keel-fl[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _storage(path: Path) -> Iterator[Any]:
    """The study's file, which several processes write to: each waits for the others."""
    from optuna.storages import RDBStorage

    storage = RDBStorage(sqlite_address(path / "sweep.db"), engine_kwargs={"connect_args": {"timeout": 60}})
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _check(plan: Plan, path: Path) -> None:
    """Whether the first of what may be tried can be run, before anything is written."""
    first = {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in plan.axes.items()}
    for spec, folder in plan.runs(first, path):
        existing(spec, folder)
    check_tasks([plan.specs(first)[0]])


def _same_search(study: "Study", plan: Plan, path: Path) -> None:
    kept = {key: value for key, value in plan.described().items() if key not in ("points", "sampler")}
    search = json.dumps({**kept, "spec": plan.base.identity}, sort_keys=True)
    if study.user_attrs.setdefault("search", search) != search:
        raise KeelError(f"out: {str(path)!r} holds another search; accepted: another folder, or none there")
    study.set_user_attr("search", search)


def _proposed(study: "Study", plan: Plan) -> "list[FrozenTrial]":
    """The trials whose point is whole; a kill can have cut the last proposal short."""
    return [trial for trial in study.get_trials() if trial.params.keys() == plan.axes.keys()]


def _point(trial: "FrozenTrial") -> Point:
    """What a trial tries. Choices are kept as JSON, since Optuna's own may not be lists."""
    return {key: json.loads(value) if isinstance(value, str) else value for key, value in trial.params.items()}


def _distribution(axis: Axis) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, list):
        return CategoricalDistribution([json.dumps(value) for value in axis])
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return IntDistribution(axis.low, axis.high, log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _sampler(plan: Plan, asked: int) -> "BaseSampler":
    """Seeded, and anew after every stop: a sampler that began again would propose what it has proposed."""
    from optuna import samplers

    kind = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "cmaes": samplers.CmaEsSampler,
        "gp": samplers.GPSampler,
    }[plan.search.sampler or "tpe"]
    return kind(seed=plan.base.seed + asked)


def _pruner(plan: Plan) -> "BasePruner | None":
    """By name. None of them judges a run in its first tenth, where the accuracy says little."""
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
