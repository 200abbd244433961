"""Runs side by side: curves over seeds, final accuracy, and what it cost to reach a target."""

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from keel.errors import KeelError
from keel.runs.folder import RunFolder
from keel.runs.spec import Spec

WINDOW = 20
"""Rounds over which accuracy is averaged before it is compared with a target."""


@dataclass(frozen=True)
class Method:
    """The runs that differ in nothing but the seed."""

    label: str
    spec: Spec
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
        return self.spec.algorithm.name

    @property
    def accuracy_mean(self) -> float | None:
        return fmean(self.final) if self.final else None

    @property
    def accuracy_std(self) -> float | None:
        """The sample standard deviation over the seeds; None for a single one."""
        return stdev(self.final) if self.final and len(self.final) > 1 else None

    def reaches(self, target: float) -> tuple[int, int] | None:
        """The first round at which the accuracy stands at the target, and the bytes until then.

        It stands there when its mean, over the seeds and over the evaluations of the last WINDOW rounds, does: the
        target is a mean over rounds too, and one lucky round does not count.
        """
        curve = self.accuracy.mean(axis=0)
        for column, t in enumerate(self.rounds):
            recent = (self.rounds > t - WINDOW) & (self.rounds <= t)
            if curve[recent].mean() >= target:
                return int(t), int(self.bytes[column])
        return None


@dataclass(frozen=True)
class Comparison:
    """Methods against the final accuracy of one of them, the baseline."""

    methods: list[Method]
    baseline: Method | None

    @property
    def target(self) -> float | None:
        return self.baseline.accuracy_mean if self.baseline else None

    def rows(self) -> list[dict[str, Any]]:
        """The table: what `keel demo --json` prints."""
        base = self.baseline.reaches(self.target) if self.baseline and self.target is not None else None
        rows = []
        for method in self.methods:
            cost = method.reaches(self.target) if self.target is not None else None
            rows.append(
                {
                    "algorithm": method.algorithm,
                    "label": method.label,
                    "seeds": len(method.seeds),
                    "status": method.status,
                    "accuracy_mean": method.accuracy_mean,
                    "accuracy_std": method.accuracy_std,
                    "rounds_to_target": cost[0] if cost else None,
                    "bytes_to_target": cost[1] if cost else None,
                    "rounds_saved": 1 - cost[0] / base[0] if cost and base else None,
                    "bytes_saved": 1 - cost[1] / base[1] if cost and base else None,
                }
            )
        return rows


def compare(folders: list[RunFolder], baseline: str = "fedavg") -> Comparison:
    """The runs in these folders, grouped to methods; the target is the baseline's final accuracy if it is there."""
    groups: dict[str, list[RunFolder]] = {}
    for folder in folders:
        groups.setdefault(folder.spec.model_copy(update={"seed": 0}).to_toml(), []).append(folder)
    specs = [group[0].spec for group in groups.values()]
    methods = [
        _method(label, spec, group) for label, spec, group in zip(_labels(specs), specs, groups.values(), strict=True)
    ]
    return Comparison(methods, next((m for m in methods if m.algorithm == baseline), None))


def _method(label: str, spec: Spec, group: list[RunFolder]) -> Method:
    histories = [folder.records() for folder in group]
    evaluated = [{r["round"]: r["accuracy"] for r in history if "accuracy" in r} for history in histories]
    rounds = sorted(set.intersection(*(set(of_run) for of_run in evaluated)))
    if not rounds:
        raise KeelError(f"run: {str(group[0].path)!r} has not been evaluated yet; accepted: runs with an evaluation")
    traffic = [np.cumsum([r["bytes_down"] + r["bytes_up"] for r in history]) for history in histories]
    columns = np.array(rounds) - 1
    summaries = [folder.summary or {"status": "running"} for folder in group]
    states = {summary["status"] for summary in summaries}
    finals = [s["accuracy"] for s in summaries if s.get("accuracy") is not None]
    return Method(
        label,
        spec,
        [folder.spec.seed for folder in group],
        np.array(rounds),
        np.array([[of_run[t] for t in rounds] for of_run in evaluated]),
        np.mean([run[columns] for run in traffic], axis=0),
        None if len(finals) < len(group) else finals,
        next((s for s in ("diverged", "interrupted", "running") if s in states), "finished"),
    )


def _labels(specs: list[Spec]) -> list[str]:
    """The algorithm's title, with the settings that tell it from others of the same title."""
    flat = [_flatten(spec.model_dump(exclude={"seed"}, exclude_none=True)) for spec in specs]
    titles = [spec.algorithm.title for spec in specs]
    labels = []
    for title, settings in zip(titles, flat, strict=True):
        twins = [other for other_title, other in zip(titles, flat, strict=True) if other_title == title]
        differing = [k for k in settings if any(other.get(k) != settings[k] for other in twins)]
        labels.append(" ".join([title, *(f"{k.split('.')[-1]}={settings[k]}" for k in differing)]))
    return labels


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
