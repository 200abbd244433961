"""Runs side by side: curves over seeds, final accuracy, and what it cost to reach a target.

Reads run folders as text: it builds no model and imports no algorithm, so that any folder can be looked at.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from statistics import fmean, stdev
from typing import Any

import numpy as np

from keel.errors import KeelError, unknown
from keel.runs.folder import RunFolder

WINDOW = 20
"""Rounds over which accuracy is averaged before it is compared with a target."""
EVALUATIONS = 3
"""Evaluations that such an average has at least."""

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
    rounds: np.ndarray
    """The rounds in which every one of the runs was evaluated."""
    accuracy: np.ndarray
    """A row per seed, a column per round of `rounds`."""
    bytes: np.ndarray
    """Up and down together until each round of `rounds`, mean over the seeds."""
    final: list[float] | None
    """Each seed's average over the last rounds; None where a run did not finish."""
    status: str

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
    def accuracy_mean(self) -> float | None:
        return fmean(self.final) if self.final else None

    @property
    def accuracy_std(self) -> float | None:
        """The sample standard deviation over the seeds; None for a single one."""
        return stdev(self.final) if self.final and len(self.final) > 1 else None

    def reaches(self, target: float) -> tuple[int, int] | None:
        """The first round at which the accuracy stands at the target, and the bytes until then.

        It stands there when its mean, over the seeds and over the evaluations of the last WINDOW rounds (EVALUATIONS
        of them at least), does: the target is a mean over rounds too, and one lucky round does not count.
        """
        if self.status == "diverged":
            return None
        curve = self.accuracy.mean(axis=0)
        for column, t in enumerate(self.rounds):
            first = min(int(np.searchsorted(self.rounds, t - WINDOW, side="right")), column - EVALUATIONS + 1)
            if first >= 0 and t >= WINDOW and curve[first : column + 1].mean() >= target:
                return int(t), int(self.bytes[column])
        return None


@dataclass(frozen=True)
class Comparison:
    """Methods, each against the final accuracy of the baseline in its own setting."""

    methods: list[Method]
    baseline: str
    holdings: list[dict[str, Any]]
    """Who holds what, once for each way that the data were dealt out."""

    def baseline_of(self, method: Method) -> Method | None:
        """The baseline's best in the setting of `method`, or None where it was not run."""
        same = [m for m in self.methods if m.algorithm == self.baseline and m.setting == method.setting]
        return max(same, key=lambda m: m.accuracy_mean or 0.0, default=None)

    @cached_property
    def targets(self) -> list[float | None]:
        """Each method's target."""
        found = [self.baseline_of(method) for method in self.methods]
        return [base.accuracy_mean if base else None for base in found]

    def rows(self) -> list[dict[str, Any]]:
        """The table: what `keel demo --json` prints."""
        return [self._row(method, target) for method, target in zip(self.methods, self.targets, strict=True)]

    def _row(self, method: Method, target: float | None) -> dict[str, Any]:
        base = self.baseline_of(method)
        cost = method.reaches(target) if target is not None else None
        reference = base.reaches(target) if base and target is not None else None
        return {
            "algorithm": method.algorithm,
            "label": method.label,
            "seeds": len(method.seeds),
            "status": method.status,
            "accuracy_mean": method.accuracy_mean,
            "accuracy_std": method.accuracy_std,
            "target": target,
            "rounds_to_target": cost[0] if cost else None,
            "bytes_to_target": cost[1] if cost else None,
            "rounds_saved": 1 - cost[0] / reference[0] if cost and reference else None,
            "bytes_saved": 1 - cost[1] / reference[1] if cost and reference else None,
        }


def compare(folders: list[RunFolder], baseline: str | None = None) -> Comparison:
    """The runs in these folders, grouped to methods. Without a baseline it is FedAvg, if that is among them."""
    groups: dict[str, dict[int, RunFolder]] = {}
    for folder in folders:
        table = folder.table
        seed = table.pop("seed")
        key = repr((table, _task(folder)))
        groups.setdefault(key, {}).setdefault(seed, folder)  # a run that was made twice counts once
    members = [list(group.values()) for group in groups.values()]
    labels = _labels([group[0] for group in members])
    methods = [_method(label, group) for label, group in zip(labels, members, strict=True)]
    if not any(len(method.rounds) for method in methods):
        raise KeelError(f"run: {str(folders[0].path)!r} has no accuracy yet; accepted: runs with an evaluation")
    if baseline is not None and baseline not in (names := [m.algorithm for m in methods]):
        raise unknown("--baseline", baseline, set(names))
    return Comparison(methods, baseline or "fedavg", _holdings([group[0] for group in members]))


def _holdings(folders: list[RunFolder]) -> list[dict[str, Any]]:
    """Those of runs of one seed; another seed deals alike."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        if (told := folder.holdings) is not None:
            found.setdefault(repr((folder.table["data"], told["name"], told["clients"])), told)
    return list(found.values())


def _method(label: str, group: list[RunFolder]) -> Method:
    histories = [folder.records() for folder in group]
    evaluated = [{r["round"]: r["accuracy"] for r in history if "accuracy" in r} for history in histories]
    known = [of_run for of_run in evaluated if of_run]  # a run that has just begun, or diverged at once, has none
    rounds = sorted(set.intersection(*map(set, known))) if known else []
    traffic = [np.cumsum([r["bytes_down"] + r["bytes_up"] for r in history]) for history in histories if history]
    columns = np.array(rounds, dtype=np.int64) - 1
    bytes_sent = [run[columns] for run in traffic if rounds and len(run) >= rounds[-1]]
    summaries = [folder.summary or {"status": "running" if folder.busy else "stopped"} for folder in group]
    states = {summary["status"] for summary in summaries}
    finals = [s["accuracy"] for s in summaries if s.get("accuracy") is not None]
    return Method(
        label,
        group[0].table,
        _task(group[0]),
        [folder.table["seed"] for folder in group],
        np.array(rounds, dtype=np.int64),
        np.array([[of_run[t] for t in rounds] for of_run in known]),
        np.mean(bytes_sent, axis=0) if bytes_sent else np.zeros(0),
        None if len(finals) < len(group) else finals,
        next((s for s in ("diverged", "interrupted", "stopped", "running") if s in states), "finished"),
    )


def _task(folder: RunFolder) -> tuple[Any, ...]:
    return tuple(folder.environment[what] for what in ("examples_sha256", "parameters", "loss"))


def _labels(folders: list[RunFolder]) -> list[str]:
    """The algorithm's title, with the settings that tell it from others of the same title."""
    flat = [_flatten({k: v for k, v in folder.table.items() if k != "seed"}) for folder in folders]
    titles = [folder.title for folder in folders]
    labels = []
    for title, settings in zip(titles, flat, strict=True):
        twins = [other for other_title, other in zip(titles, flat, strict=True) if other_title == title]
        differing = [k for k in settings if any(other.get(k) != settings[k] for other in twins)]
        labels.append(" ".join([title, *(f"{k.removeprefix('algorithm.')}={_short(settings[k])}" for k in differing)]))
    return labels


def _short(value: Any) -> Any:
    return PurePath(value).name if isinstance(value, str) and "/" in value else value


def _flatten(table: Table, prefix: str = "") -> Table:
    flat: Table = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
