"""What the page and the charts show of each setting: methods that may be measured against one another.

Curves are thinned to what a screen can show; numbers of the table are those of the comparison, untouched.
"""

import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import numpy as np

from keel.reporting import charts
from keel.reporting.comparison import Comparison, Method, Setting, shared
from keel.runs.folder import RunFolder
from keel.runs.spec import CUSTOM, assignments, files_of, flatten

SHOWN = 8
"""Methods that are drawn at first where there are more."""
POINTS, ALL_POINTS = 400, 40_000
"""Points of a curve at the most, and of all curves of a page together."""
ROUNDS, CLIENTS = 120, 100
"""Columns and rows of the picture of who took part."""
Columns = dict[str, Any]
"""A method's series: `rounds`, `bytes` and `time` as lists, a quantity as its mean, low and high over the seeds."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """The methods of one setting."""

    setting: Setting
    methods: list[Method]
    labels: list[str]
    baseline: int | None
    """The place among the methods of the one that the others are measured against."""
    target: float | None
    points: int

    @cached_property
    def ranked(self) -> list[int]:
        """The places of the methods, where there are too many to show all: the baseline and the best come first."""
        places = list(range(len(self.methods)))
        if len(places) <= SHOWN:
            return places
        return sorted(places, key=lambda i: (i != self.baseline, -(self.methods[i].accuracy_mean or 0.0)))

    @cached_property
    def clock(self) -> tuple[str, int]:
        """The unit of time that suits, and its seconds."""
        longest = max(method.total.seconds for method in self.methods)
        return next(((u, s) for u, s in (("hours", 3600), ("minutes", 60)) if longest >= 2 * s), ("seconds", 1))

    @cached_property
    def curves(self) -> list[Columns]:
        """Of each method, over rounds, bytes and time."""
        return [self._curve(method) for method in self.methods]

    def _curve(self, method: Method) -> Columns:
        kept = _thin(len(method.rounds), self.points)
        return {
            "rounds": method.rounds[kept].tolist(),
            "bytes": [int(value) for value in method.bytes[kept]],
            "time": _short(method.seconds[kept] / self.clock[1]),
            "accuracy": _over_seeds(method.accuracy[:, kept] if len(kept) else method.accuracy),
            "loss": _over_seeds(method.loss[:, kept] if len(kept) else method.loss),
        }

    @cached_property
    def drift(self) -> list[Columns]:
        """Of each method, where it was recorded, over rounds."""
        return [_recorded(method, self.points) for method in self.methods]

    @cached_property
    def held(self) -> dict[str, Any] | None:
        """Who holds what, where it was written down and there are classes."""
        told = self.methods[0].folders[0].holdings
        return told if told and "picture" in told else None

    @cached_property
    def cohorts(self) -> RunFolder | None:
        """The run whose cohorts are shown; other methods of the setting have the same ones with the same seed."""
        methods = [method for method in self.methods if method.algorithm != "centralized" and method.total.rounds]
        begun = (folder for method in methods for folder in method.folders)
        return next((folder for folder in begun if folder.records()), None)

    def charts(self, live: bool = False) -> dict[str, alt.Chart | alt.LayerChart]:
        """Each by its name. Those for the page are `live` and know all methods; others those shown at first."""
        axes = {"rounds": charts.ROUNDS, "bytes": charts.BYTES, "time": charts.time(self.clock[0])}
        labels = [self.labels[place] for place in (self.ranked if live else self.ranked[:SHOWN])]
        once = min(len(curve["rounds"]) for curve in self.curves) < 2
        found: dict[str, alt.Chart | alt.LayerChart] = {}
        for over, x in axes.items():
            aimed = self.target is not None or live  # the page's reader can aim where the runs had no target
            found[f"accuracy-over-{over}"] = charts.lines(labels, x, charts.ACCURACY, once, aimed, live)
            if _known(self.curves, "loss"):
                found[f"loss-over-{over}"] = charts.lines(labels, x, charts.LOSS, once, live=live)
        found |= {f"accuracy-and-{over}": charts.cost_and_quality(labels, x, charts.FINAL) for over, x in axes.items()}
        for name, quantity in (("drift", charts.DRIFT), ("momentum_angle", charts.ANGLE)):
            if _known(self.drift, name):
                found[name] = charts.lines(labels, charts.ROUNDS, quantity, live=live)
        if self.held:
            picture = self.held["picture"]
            found["who-holds-what"] = charts.who_holds_what(_texts(picture["clients"]), _texts(picture["classes"]))
        if self.cohorts:
            found["who-took-part"] = charts.who_took_part()
        return found

    def filled(self, name: str, chart: alt.Chart | alt.LayerChart) -> dict[str, Any]:
        """The chart of that name in Vega-Lite, with what it shows at first."""
        data = {charts.ROWS: self.rows(name), charts.TARGETS: [{"target": self.target}]}
        return chart.to_dict() | {"datasets": data}

    def rows(self, name: str) -> Rows:
        """What a chart shows at first, at the setting's own target."""
        if name in self.pictures:
            return self.pictures[name]
        what, _, over = name.partition("-and-")
        if over:
            return self._costs(over)
        what, _, over = name.partition("-over-")
        source = self.curves if over else self.drift
        return [
            {"method": self.labels[place], "x": x, "mean": mean, "low": low, "high": high}
            for place in self.ranked[:SHOWN]
            if what in source[place]
            for x, mean, low, high in zip(source[place][over or "rounds"], *_bands(source[place][what]), strict=True)
        ]

    def _costs(self, over: str) -> Rows:
        found = []
        for place in self.ranked[:SHOWN]:
            label, method = self.labels[place], self.methods[place]
            spent = method.reaches(self.target) if self.target is not None else None
            if spent and method.accuracy_mean is not None:
                x = {"rounds": spent.rounds, "bytes": spent.bytes, "time": spent.seconds / self.clock[1]}[over]
                mean, spread = method.accuracy_mean, method.accuracy_std or 0.0
                found.append({"method": label, "x": x, "mean": mean, "low": mean - spread, "high": mean + spread})
        return found

    @cached_property
    def pictures(self) -> dict[str, Rows]:
        """The rows of the charts that are the same for all methods."""
        shown = {"who-took-part": _participation(self.cohorts)} if self.cohorts else {}
        return shown | ({"who-holds-what": _holdings(self.held["picture"])} if self.held else {})

    @cached_property
    def differing(self) -> tuple[list[str], list[list[str]]]:
        """The settings that differ between the methods, and a row of their values for each."""
        flat = [flatten(shared(method.folders[0])) for method in self.methods]
        known = dict.fromkeys(key for table in flat for key in table)
        keys = [key for key in known if any(table.get(key) != flat[0].get(key) for table in flat)]
        return keys, [[str(table.get(key, "")) for key in keys] for table in flat]

    @cached_property
    def commands(self) -> list[list[tuple[int, list[str], str]]]:
        """For each method the seeds, the commands that make their runs again, and what these need besides."""
        return [
            [(seed, *_command(folder)) for seed, folder in zip(method.seeds, method.folders, strict=True)]
            for method in self.methods
        ]


def sections(comparison: Comparison) -> list[Section]:
    """One for each setting of the comparison."""
    points = max(2, min(POINTS, ALL_POINTS // len(comparison.methods)))
    found = []
    for setting in comparison.settings:
        methods = [comparison.methods[place] for place in setting.places]
        base = comparison.baseline_of(methods[0])
        baseline = None if base is None else next(i for i, method in enumerate(methods) if method is base)
        target = comparison.targets[setting.places[0]]
        found.append(Section(setting, methods, setting.labels, baseline, target, points))
    return found


def _command(folder: RunFolder) -> tuple[list[str], str]:
    """The words of the command that makes a run again, from any folder, and what it needs; none where none can."""
    table, known = folder.table, folder.environment
    own = [part for part in ("data", "model", "algorithm") if table[part]["name"] == CUSTOM]
    own += ["loss"] if known["loss"] == CUSTOM else []
    if own:
        return [], f"from Python, with the {', the '.join(own)} that was passed to keel.run"
    name, files = table["algorithm"]["name"], files_of(table)
    needs = [f"the files at {', '.join(files)}"] if files else []
    needs += [f"the module {name.partition(':')[0]} on the import path"] if ":" in name else []
    options = ["--algorithm", name, "--seed", str(table["seed"])]
    for assignment in assignments(table):
        if assignment.partition("=")[0] not in ("algorithm.name", "seed"):
            options += ["--set", assignment]
    words = [shlex.quote(word) for word in ("keel", "run", *options)]
    return words, f"needs {' and '.join(needs)}" if needs else ""


def _thin(count: int, most: int) -> np.ndarray:
    """Places evenly taken from `count`, the last one always among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _short(values: np.ndarray) -> list[float | None]:
    """To five digits, which is more than a screen shows; None for what is no number."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _over_seeds(values: np.ndarray) -> dict[str, list[float | None]]:
    """Of one seed the mean alone: it is the lowest and the highest as well."""
    if len(values) < 2:
        return {"mean": _short(values.reshape(-1))}
    return {"mean": _short(values.mean(0)), "low": _short(values.min(0)), "high": _short(values.max(0))}


def _bands(series: dict[str, list[float | None]]) -> list[list[float | None]]:
    return [series.get(name, series["mean"]) for name in ("mean", "low", "high")]


def _known(source: list[Columns], name: str) -> bool:
    return any(value is not None for columns in source if name in columns for value in columns[name]["mean"])


def _recorded(method: Method, points: int) -> Columns:
    if not method.table["evaluation"].get("drift"):
        return {}
    histories = [history for folder in method.folders if (history := folder.records())]
    kept = _thin(min(map(len, histories), default=0), points)
    columns: Columns = {"rounds": (kept + 1).tolist()}
    for name in ("drift", "momentum_angle"):
        of_seeds = [[history[t].get(name) for t in kept] for history in histories]
        columns[name] = _over_seeds(np.array(of_seeds, dtype=np.float64))
    return columns


def _holdings(picture: dict[str, Any]) -> Rows:
    return [
        {"client": str(client), "class": str(label), "examples": count, "share": round(count / total, 3)}
        for client, row, total in zip(picture["clients"], picture["counts"], picture["examples"], strict=True)
        for label, count in zip(picture["classes"], row, strict=True)
        if count
    ]


def _participation(folder: RunFolder) -> Rows:
    """How often the clients took part, some of them and some of the rounds together where there are many."""
    cohorts = [record["cohort"] for record in folder.records()]
    told = folder.holdings
    clients = told["clients"] if told else 1 + max(client for cohort in cohorts for client in cohort)
    wide, high = -(-len(cohorts) // ROUNDS), -(-clients // CLIENTS)
    times: dict[tuple[int, int], int] = {}
    for t, cohort in enumerate(cohorts):
        for client in cohort:
            times[t // wide, client // high] = times.get((t // wide, client // high), 0) + 1
    return [
        {
            "round": 1 + wide * column,
            "round_end": 1 + wide * (column + 1),
            "client": high * row,
            "client_end": high * (row + 1),
            "times": count,
        }
        for (column, row), count in times.items()
    ]


def _texts(values: list[Any]) -> list[str]:
    return [str(value) for value in values]
