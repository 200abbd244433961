"""Runs side by side: curves over seeds, final accuracy, and what it cost to reach a target.

Reads run folders as text: it builds no model and imports no algorithm, so that any folder can be looked at.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from math import sqrt
from pathlib import PurePath
from statistics import fmean, stdev
from typing import Any

import numpy as np

from keel.engines import at_once
from keel.errors import KeelError, unknown
from keel.network import Network
from keel.rounds import Record
from keel.runs.folder import RunFolder
from keel.runs.spec import NO_PART, engine_bits, flatten

WINDOW = 20
"""Rounds over which accuracy is averaged before it is compared with a target."""
EVALUATIONS = 3
"""Evaluations that such an average has at least."""

ROUNDING = 1e-9
"""Two means of the same numbers may differ by less."""
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
STUDENT += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]
"""The 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the last is near enough."""

Table = dict[str, Any]
"""A resolved spec, as it stands in spec.toml."""


@dataclass(frozen=True)
class Method:
    """The runs that differ in nothing but the seed."""

    label: str
    table: Table
    task: tuple[Any, ...]
    """What tells tasks apart whose specs are equal, as where data and a model were passed in Python."""
    seeds: list[int]
    evaluated: list[int]
    """Those of the seeds whose runs were evaluated: one that has just begun, or diverged at once, was not."""
    rounds: np.ndarray
    """The rounds in which every one of these was evaluated."""
    accuracy: np.ndarray
    """A row per seed that was evaluated, a column per round of `rounds`."""
    loss: np.ndarray
    """On the test examples, likewise."""
    bytes: np.ndarray
    """Up and down together until each round of `rounds`, mean over the seeds."""
    seconds: np.ndarray
    """On the machine that ran it, likewise."""
    total: "Spent"
    """Over all rounds, mean over the seeds."""
    budget: "Spent"
    """What the rounds of the spec take, likewise; a run that ended before them counts at its mean round until then."""
    final: list[float] | None
    """Each seed's average over the last rounds; None where a run did not finish."""
    status: str
    folders: list[RunFolder]
    """Those of the seeds."""

    @property
    def algorithm(self) -> str:
        return self.table["algorithm"]["name"]

    @property
    def setting(self) -> Table:
        """What two methods must share to be measured against one another: all but the algorithm and its rates."""
        local = {k: v for k, v in self.table["local"].items() if k in ("epochs", "steps", "batch", "drop_last")}
        shared = ("rounds", "data", "model", "participation", "evaluation")
        return {**{k: self.table[k] for k in shared}, "local": local, "task": self.task}

    @property
    def window(self) -> int:
        """Rounds over which accuracy is averaged before it is compared with a target: never more than final ones."""
        return min(WINDOW, self.table["evaluation"]["last"])

    @property
    def accuracy_mean(self) -> float | None:
        return fmean(self.final) if self.final else None

    @property
    def accuracy_std(self) -> float | None:
        """The sample standard deviation over the seeds; None for a single one."""
        return stdev(self.final) if self.final and len(self.final) > 1 else None

    @property
    def accuracy_interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean over the seeds, by Student's t."""
        if self.final is None or self.accuracy_std is None:
            return None
        freedom = len(self.final) - 1
        return STUDENT[min(freedom, len(STUDENT)) - 1] * self.accuracy_std / sqrt(len(self.final))

    def reaches(self, target: float) -> "Spent | None":
        """What was spent until the accuracy stands at the target, or None where it never does.

        It stands there when its mean, over the seeds and over the evaluations of the last `window` rounds (EVALUATIONS
        of them at least), does: the target is a mean over rounds too, and one lucky round does not count.
        """
        return next((spent for level, spent in self.standing if level >= target - ROUNDING), None)

    @cached_property
    def standing(self) -> list[tuple[float, "Spent"]]:
        """The accuracies at which the method comes to stand, each above those before, and what it had spent then."""
        if self.status == "diverged" or not len(self.rounds):
            return []
        found: list[tuple[float, Spent]] = []
        for column, level in enumerate(_levels(self.rounds, self.accuracy.mean(axis=0), self.window)):
            if level > (found[-1][0] if found else -np.inf):
                spent = Spent(int(self.rounds[column]), int(self.bytes[column]), float(self.seconds[column]))
                found.append((float(level), spent))
        return found

    def reaches_by_seed(self, target: float) -> list[int | None]:
        """The round at which each seed's own accuracy stands at the target, in the order of `seeds`."""
        if self.status == "diverged":
            return [None] * len(self.seeds)
        curves = dict(zip(self.evaluated, self.accuracy, strict=True))
        found = [_stands(self.rounds, curves[s], target, self.window) if s in curves else None for s in self.seeds]
        return [None if column is None else int(self.rounds[column]) for column in found]


@dataclass(frozen=True)
class Spent:
    rounds: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """What it costs to reach the quality of the baseline, by the three steps of the paper (its appendix on cost)."""

    share: float
    """s = r / T: rounds until the target, of all rounds; 1 where it is never reached, and for the baseline."""
    bytes: float
    """tb = b s, for b bytes in all rounds."""
    seconds: float
    """tt = t s, for t seconds in all rounds."""
    bytes_saved: float
    """1 - tb / tb of the baseline: a reduction above 0, an increase below."""
    seconds_saved: float


def cost(rounds: int | None, total: Spent, baseline: Spent) -> Cost:
    """That of a method which reaches the target after so many `rounds`, if it does."""
    share = min(rounds or total.rounds, total.rounds) / total.rounds
    spent_bytes, spent_seconds = share * total.bytes, share * total.seconds
    return Cost(
        share,
        spent_bytes,
        spent_seconds,
        1 - spent_bytes / baseline.bytes if baseline.bytes else 0.0,
        1 - spent_seconds / baseline.seconds if baseline.seconds else 0.0,
    )


def _stands(rounds: np.ndarray, curve: np.ndarray, target: float, window: int) -> int | None:
    """The first column at which the mean over the last `window` rounds is at the target."""
    reached = np.flatnonzero(_levels(rounds, curve, window) >= target - ROUNDING)
    return int(reached[0]) if len(reached) else None


def _levels(rounds: np.ndarray, curve: np.ndarray, window: int) -> np.ndarray:
    """The mean over the last `window` rounds at each column; -inf where there are too few."""
    columns = np.arange(len(rounds))
    firsts = np.minimum(np.searchsorted(rounds, rounds - window, side="right"), columns - EVALUATIONS + 1)
    levels = np.full(len(rounds), -np.inf)
    for column in np.flatnonzero((firsts >= 0) & (rounds >= window)):
        levels[column] = curve[firsts[column] : column + 1].mean()
    return levels


@dataclass(frozen=True)
class Setting:
    """Methods of a comparison that may be measured against one another."""

    heading: str
    particular: Table
    """The fields by which it differs from other settings."""
    places: list[int]
    """Of its methods in the comparison."""
    labels: list[str]
    """Their names, as far as it takes to tell them apart here."""

    @property
    def title(self) -> str:
        return f"{self.heading}: {self.particulars}" if self.particular else self.heading

    @property
    def particulars(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.particular.items())


@dataclass(frozen=True)
class Comparison:
    """Methods, each against a target: the final accuracy of the baseline in its own setting, or one for all."""

    methods: list[Method]
    baseline: str
    holdings: list[dict[str, Any]]
    """Who holds what, once for each way that the data were dealt out."""
    target: float | None = None

    def baseline_of(self, method: Method) -> Method | None:
        """The baseline's best in the setting of `method`, or None where it was not run."""
        same = [m for m in self.methods if m.algorithm == self.baseline and m.setting == method.setting]
        return max(same, key=lambda m: m.accuracy_mean or 0.0, default=None)

    @property
    def window(self) -> int:
        """The longest of the methods'."""
        return max(method.window for method in self.methods)

    @cached_property
    def settings(self) -> list["Setting"]:
        """The methods that may be measured against one another together, in the order of their first."""
        groups: list[list[int]] = []
        for place, method in enumerate(self.methods):
            same = next((group for group in groups if alike(self.methods[group[0]], method)), None)
            if same is None:
                groups.append([place])
            else:
                same.append(place)
        flat = [flatten(self.methods[group[0]].setting) for group in groups]
        return [self._setting(group, own, flat) for group, own in zip(groups, flat, strict=True)]

    def _setting(self, places: list[int], own: Table, every: list[Table]) -> "Setting":
        named = ("data.name", "model.name", "task")
        labels = [self.methods[place].label for place in places]
        if len(every) > 1:  # what the setting says of all its methods they need not say again
            labels = labels_of([self.methods[place].folders[0] for place in places])
        return Setting(
            f"{own['data.name']}, {own['model.name']}",
            {k: v for k, v in own.items() if k not in named and any(other.get(k) != v for other in every)},
            places,
            labels,
        )

    @cached_property
    def varied(self) -> list[str]:
        """The fields whose values tell settings, or methods of the same algorithm, apart."""
        apart = [setting.particular for setting in self.settings]
        apart += _apart([method.folders[0] for method in self.methods])
        return list(dict.fromkeys(key for settings in apart for key in settings))

    @cached_property
    def targets(self) -> list[float | None]:
        """Each method's target."""
        if self.target is not None:
            return [self.target] * len(self.methods)
        found = [self.baseline_of(method) for method in self.methods]
        return [base.accuracy_mean if base else None for base in found]

    def rows(self) -> list[dict[str, Any]]:
        """The table: what `keel demo --json` prints."""
        return [self._row(method, target) for method, target in zip(self.methods, self.targets, strict=True)]

    def places(self) -> list[int | None]:
        """Each method's place by accuracy among those of its setting, from 1; None for one that did not finish."""
        return [
            None
            if method.accuracy_mean is None
            else 1 + sum((m.accuracy_mean or 0) > method.accuracy_mean for m in self.methods if alike(m, method))
            for method in self.methods
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from keel.reporting.notebook import comparison_html  # what draws is needed only here

        return comparison_html(self)

    def _row(self, method: Method, target: float | None) -> dict[str, Any]:
        base = self.baseline_of(method)
        spent = method.reaches(target) if target is not None else None
        reference = base.reaches(target) if base and target is not None else None
        row = {
            "algorithm": method.algorithm,
            "label": method.label,
            "fields": {key: flatten(method.table).get(key) for key in self.varied},
            "seeds": len(method.seeds),
            "status": method.status,
            "accuracy_mean": method.accuracy_mean,
            "accuracy_std": method.accuracy_std,
            "accuracy_interval": method.accuracy_interval,
            "accuracy_seeds": method.final,
            "target": target,
            "rounds_to_target": spent.rounds if spent else None,
            "rounds_to_target_seeds": method.reaches_by_seed(target) if target is not None else None,
            "bytes_to_target": spent.bytes if spent else None,
            "seconds_to_target": spent.seconds if spent else None,
            "rounds_saved": 1 - spent.rounds / reference.rounds if spent and reference else None,
            "bytes_saved": 1 - spent.bytes / reference.bytes if spent and reference and reference.bytes else None,
        }
        ended = method.status in ("finished", "diverged") and method.total.rounds
        if base is not None and target is not None and base.status == "finished" and ended:
            row["cost"] = asdict(self._cost(method, base, spent))
        return row

    def _cost(self, method: Method, base: Method, spent: Spent | None) -> Cost:
        """Where the target is the baseline's final accuracy, that pays for all its rounds: they bought it."""
        whole = cost(None, base.total, base.total)
        if self.target is not None and (reference := base.reaches(self.target)):
            whole = cost(reference.rounds, base.total, base.total)
        elif method is base:
            spent = None
        baseline = Spent(base.total.rounds, round(whole.bytes), whole.seconds)
        return cost(spent.rounds if spent else None, method.budget, baseline)


def compare(
    folders: list[RunFolder],
    baseline: str | None = None,
    target: float | None = None,
    network: Network | None = None,
) -> Comparison:
    """The runs in these folders, grouped to methods. Without a baseline it is FedAvg, if that is among them.

    With a network (here, or in the specs) time is what a federation of that kind would need, else that of the machine.
    """
    groups: dict[str, dict[int, RunFolder]] = {}
    own = {repr(folder.table.get("network")): folder.table.get("network") for folder in folders}
    if network is None and len(own) == 1 and (common := next(iter(own.values()))) is not None:
        network = Network(**common)  # where runs have different ones, time is that of the machine
    for folder in sorted(folders, key=lambda folder: not folder.ended):
        key = repr((shared(folder), _task(folder)))
        groups.setdefault(key, {}).setdefault(folder.table["seed"], folder)  # made twice, it counts once: a whole one
    members = [list(group.values()) for group in groups.values()]
    labels = labels_of([group[0] for group in members])
    methods = [_method(label, group, network) for label, group in zip(labels, members, strict=True)]
    if not any(len(method.rounds) for method in methods):
        raise KeelError(f"run: {str(folders[0].path)!r} has no accuracy yet; accepted: runs with an evaluation")
    if baseline is not None and baseline not in (names := [m.algorithm for m in methods]):
        raise unknown("--target", baseline, set(names))
    return Comparison(methods, baseline or "fedavg", _holdings([group[0] for group in members]), target)


def _holdings(folders: list[RunFolder]) -> list[dict[str, Any]]:
    """Those of runs of one seed; another seed deals alike."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        if (told := folder.holdings) is not None:
            found.setdefault(repr((folder.table["data"], told["name"], told["clients"])), told)
    return list(found.values())


def _method(label: str, group: list[RunFolder], network: Network | None) -> Method:
    histories = [folder.records() for folder in group]
    evaluated = [{r["round"]: r for r in history if "accuracy" in r} for history in histories]
    seeds = [folder.table["seed"] for folder in group]
    known = [of_run for of_run in evaluated if of_run]
    rounds = sorted(set.intersection(*map(set, known))) if known else []
    traffic = [np.cumsum([r["bytes_down"] + r["bytes_up"] for r in history]) for history in histories if history]
    clocks = [
        np.cumsum(_seconds(folder, history, network))
        for folder, history in zip(group, histories, strict=True)
        if history
    ]
    columns = np.array(rounds, dtype=np.int64) - 1
    planned = group[0].table["rounds"]
    summaries = [folder.summary or {"status": "unfinished"} for folder in group]
    states = {summary["status"] for summary in summaries}
    finals = [s["accuracy"] for s in summaries if s.get("accuracy") is not None]
    return Method(
        label,
        group[0].table,
        _task(group[0]),
        seeds,
        [seed for seed, of_run in zip(seeds, evaluated, strict=True) if of_run],
        np.array(rounds, dtype=np.int64),
        np.array([[of_run[t]["accuracy"] for t in rounds] for of_run in known]),
        np.array([[of_run[t].get("test_loss", np.nan) for t in rounds] for of_run in known]),
        _at(columns, traffic),
        _at(columns, clocks),
        Spent(
            max(map(len, histories)),
            round(fmean([run[-1] for run in traffic])) if traffic else 0,
            fmean([clock[-1] for clock in clocks if len(clock)] or [0.0]),
        ),
        Spent(
            planned,
            round(fmean([planned * run[-1] / len(run) for run in traffic])) if traffic else 0,
            fmean([planned * clock[-1] / len(clock) for clock in clocks if len(clock)] or [0.0]),
        ),
        None if len(finals) < len(group) else finals,
        next((s for s in ("diverged", "interrupted", "unfinished") if s in states), "finished"),
        group,
    )


def _seconds(folder: RunFolder, history: list[Record], network: Network | None) -> list[float]:
    """Of each round: on the machine, or in a federation with a network."""
    measured = folder.seconds()
    if network is None or not measured:
        return measured
    # the median round has no evaluation in it, and not the start of the workers
    cohort = len(history[0]["cohort"])
    computing = float(np.median(measured)) * at_once(folder.engine, folder.environment["workers"], cohort) / cohort
    seed = folder.table["seed"]
    return [
        network.round_seconds(
            seed,
            record["round"],
            record["cohort"],
            record["bytes_down"] / len(record["cohort"]),
            record["bytes_up"] / len(record["cohort"]),
            computing,
        )
        for record in history
    ]


def _at(columns: np.ndarray, series: list[np.ndarray]) -> np.ndarray:
    """The mean of those series that are long enough, at these columns."""
    long = [each[columns] for each in series if len(columns) and len(each) > columns[-1]]
    return np.mean(long, axis=0) if long else np.zeros(len(columns))


def alike(one: Method, other: Method) -> bool:
    """Whether they may be measured against one another."""
    return one.setting == other.setting


def shared(folder: RunFolder) -> Table:
    """What the runs of one method share: all of the spec but the seed and what does not change the bits.

    Of the engine that is how it computes: the cohort in batches, or client after client, in however many processes.
    """
    table = {k: v for k, v in folder.table.items() if k not in ("seed", *NO_PART)}
    return {**table, "engine": engine_bits({**table["engine"], "name": folder.engine})}


def _task(folder: RunFolder) -> tuple[Any, ...]:
    return tuple(folder.environment[what] for what in ("examples_sha256", "parameters", "loss"))


def labels_of(folders: list[RunFolder]) -> list[str]:
    """The algorithm's title, with the settings that tell it from others of the same title."""
    return [
        " ".join([folder.title, *(f"{k.removeprefix('algorithm.')}={_short(v)}" for k, v in apart.items())])
        for folder, apart in zip(folders, _apart(folders), strict=True)
    ]


def _apart(folders: list[RunFolder]) -> list[Table]:
    """The settings that tell each from others of the same title."""
    flat = [(folder.title, flatten(shared(folder))) for folder in folders]
    return [
        {k: v for k, v in own.items() if any(other.get(k) != v for twin, other in flat if twin == title)}
        for title, own in flat
    ]


def _short(value: Any) -> Any:
    return PurePath(value).name if isinstance(value, str) and "/" in value else value
