"""The content of the page and the charts for each setting.

Curves are thinned to what a screen can show; the numbers in the tables are exact.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np

from keel.config.overrides import flatten
from keel.core.records import PrimaryMetric
from keel.report import charts
from keel.report.altair_adapter import alt
from keel.report.commands import RerunCommands
from keel.report.comparison import Comparison, Setting
from keel.report.label_distribution import picture_labels
from keel.report.loaded_run import LoadedRun
from keel.report.loading import varied_fields
from keel.report.method import Method
from keel.report.picture import NO_MOMENTUM, Deviation
from keel.report.recorded import Series

SHOWN = 8
"""Maximum number of methods that a chart shows initially."""
POINTS, ALL_POINTS = 400, 40_000
"""Maximum number of points of a curve, and of all curves of a page."""
ROUNDS, CLIENTS = 120, 100
"""Maximum number of columns and rows of the participation chart."""
CLIENTS_CHART = "over-clients"
DECILES = ("mean", "worst_decile", "best_decile")
"""The statistics over clients that are drawn."""
CHART_NAME = re.compile(r"(.*)-(and|over)-(rounds|bytes|time)", re.DOTALL)
"""The name of a chart of curves or costs: what it shows, and over what. Users name metrics."""
Columns = dict[str, Any]
"""The series of a method: `rounds`, `bytes` and `time` as lists; in `series`, quantities by their names, which users
choose, each as its mean, low and high over seeds."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """The methods of one setting."""

    setting: Setting
    methods: list[Method]
    labels: list[str]
    baseline: int | None
    """Index of the baseline among the methods."""
    target: float | None
    points: int
    deviation: Deviation = field(default_factory=dict)
    """How far momentum is from the direction of all clients, if it is to be shown."""

    @property
    def primary(self) -> PrimaryMetric:
        return self.methods[0].primary

    @cached_property
    def ranked(self) -> list[int]:
        """Indices of the methods in the order of drawing: if not all can be shown, the baseline and the best first."""
        indices = list(range(len(self.methods)))
        if len(indices) <= SHOWN:
            return indices
        return sorted(indices, key=lambda i: (i != self.baseline, -self.methods[i].score))

    @cached_property
    def clock(self) -> tuple[str, int]:
        """The unit of wall-clock time on the axes, and its length in seconds."""
        longest = max(method.total.seconds for method in self.methods)
        return next(((u, s) for u, s in (("hours", 3600), ("minutes", 60)) if longest >= 2 * s), ("seconds", 1))

    @cached_property
    def curves(self) -> list[Columns]:
        """The primary metric and the loss of each method over rounds, bytes and wall-clock time."""
        return [self._curve(method) for method in self.methods]

    def _curve(self, method: Method) -> Columns:
        kept = _thin(len(method.rounds), self.points)
        return {
            "rounds": method.rounds[kept].tolist(),
            "bytes": [int(value) for value in method.bytes[kept]],
            "time": _short(method.seconds[kept] / self.clock[1]),
            "series": {
                "loss": _over_seeds(method.loss[:, kept]),
                self.primary.name: _over_seeds(method.values[:, kept]) | self._seeds(method, kept),
            },
        }

    def _seeds(self, method: Method, kept: np.ndarray) -> dict[str, Any]:
        """Return the curve of each seed, if there are several and the page remains small."""
        runs = sum(len(each.evaluated) for each in self.methods)
        if len(method.evaluated) < 2 or runs * self.points > ALL_POINTS:
            return {}
        return {"seeds": [_short(values) for values in method.values[:, kept]]}

    @cached_property
    def drift(self) -> list[Columns]:
        """Client drift of each method over rounds, where it was recorded."""
        return [_recorded(method, self.points) for method in self.methods]

    @cached_property
    def other(self) -> list[dict[str, Columns]]:
        """The other numbers of each method over rounds, by the name of their chart."""
        return [
            {_chart_name(name): _columns(series, self.points) for name, series in method.other.items()}
            for method in self.methods
        ]

    @cached_property
    def other_quantities(self) -> dict[str, charts.Quantity]:
        """What the charts of `other` show."""
        result: dict[str, charts.Quantity] = {}
        for name in dict.fromkeys(name for method in self.methods for name in method.other):
            series = [method.other[name] for method in self.methods if name in method.other]
            result[_chart_name(name)] = charts.metric(series[0].label, all(one.is_fraction for one in series))
        return result

    @cached_property
    def clients(self) -> list[dict[str, Columns]]:
        """The primary metric of each method over clients: its mean, from the worst (low) to the best decile (high)."""
        return [
            {CLIENTS_CHART: _deciles(method, self.points)} if method.clients.keys() >= {*DECILES} else {}
            for method in self.methods
        ]

    @cached_property
    def client_statistics(self) -> dict[str, Any] | None:
        """Statistics of the clients, where they were recorded and there are classes."""
        statistics = self.methods[0].runs[0].client_statistics
        return statistics if statistics and "picture" in statistics else None

    @cached_property
    def cohort_run(self) -> LoadedRun | None:
        """The run whose cohorts are shown; other methods have the same cohorts from the same seed."""
        methods = (method for method in self.methods if method.algorithm != "centralized")
        return next((run for method in methods for run in method.runs if len(run.history.cohorts)), None)

    def charts(self, live: bool = False) -> dict[str, alt.Chart | alt.LayerChart]:
        """Return the charts by name: `live` ones for the page, with all methods; others with those shown initially."""
        metric, label = self.primary.name, self.primary.label
        quality = charts.metric(f"test {label.removeprefix('test ')}", self.primary.is_fraction)
        axes = {
            "rounds": charts.ROUNDS,
            "bytes": charts.BYTES,
            "time": charts.time(self.clock[0], self.methods[0].modelled),
        }
        labels = [self.labels[index] for index in (self.ranked if live else self.ranked[:SHOWN])]
        single = min(len(curve["rounds"]) for curve in self.curves) < 2
        result: dict[str, alt.Chart | alt.LayerChart] = {}
        for over, x in axes.items():
            has_target = self.target is not None or live  # readers of the page can choose a target
            result[f"{metric}-over-{over}"] = charts.lines(labels, x, quality, single, has_target, live)
            if metric not in ("test_loss", "loss") and _has_values(self.curves, "loss"):
                result[f"loss-over-{over}"] = charts.lines(labels, x, charts.LOSS, single, live=live)
        final = charts.metric(f"final {label}", self.primary.is_fraction)
        result |= {f"{metric}-and-{over}": charts.cost_and_quality(labels, x, final) for over, x in axes.items()}
        for name, quantity in (("drift", charts.DRIFT), ("momentum_angle", charts.ANGLE)):
            if _has_values(self.drift, name):
                result[name] = charts.lines(labels, charts.ROUNDS, quantity, live=live)
        if "deviation" in self.heatmaps:
            taus = [*(_tau_label(tau) for tau in self.deviation), NO_MOMENTUM]
            result["deviation"] = charts.lines(taus, charts.ROUNDS, charts.DEVIATION, live=live)
        for name, quantity in self.other_quantities.items():
            result[name] = charts.lines(labels, charts.ROUNDS, quantity, single, live=live)
        if any(self.clients):
            over_clients = charts.metric(f"{label} over clients", self.primary.is_fraction)
            result[CLIENTS_CHART] = charts.deciles(labels, charts.ROUNDS, over_clients, live)
        if self.client_statistics:
            result["label-distribution"] = charts.label_distribution(*picture_labels(self.client_statistics["picture"]))
        if self.cohort_run:
            result["participation"] = charts.participation()
        return result

    def filled(self, name: str, chart: alt.Chart | alt.LayerChart) -> dict[str, Any]:
        """Return the chart of that name as Vega-Lite, with the data that it shows initially."""
        data = {charts.ROWS: self.rows(name), charts.TARGETS: [{"target": self.target}]}
        return chart.to_dict(validate=False) | {"datasets": data}  # validation would take most of the time

    def rows(self, name: str) -> Rows:
        """Return the data that a chart shows initially."""
        if name in self.heatmaps:
            return self.heatmaps[name]
        if name in self.other_quantities or name == CLIENTS_CHART:
            source = self.clients if name == CLIENTS_CHART else self.other
            return self._points([of_method.get(name, {}) for of_method in source], "rounds", "value")
        if (parts := CHART_NAME.fullmatch(name)) is None:
            return self._points(self.drift, "rounds", name)
        quantity, word, over = parts.groups()
        return self._costs(over) if word == "and" else self._points(self.curves, over, quantity)

    def _points(self, source: list[Columns], over: str, quantity: str) -> Rows:
        """Return the points of a quantity of the methods that are shown initially."""
        shown = [(self.labels[i], source[i]) for i in self.ranked[:SHOWN] if quantity in source[i].get("series", {})]
        return [
            {"method": label, "x": x, "mean": mean, "low": low, "high": high}
            for label, columns in shown
            for x, mean, low, high in zip(columns[over], *_bands(columns["series"][quantity]), strict=True)
        ]

    def _costs(self, over: str) -> Rows:
        """Return a point for each method that reaches the target: what it spent, and its final value."""
        points = []
        for index in self.ranked[:SHOWN]:
            label, method = self.labels[index], self.methods[index]
            spent = method.reaches(self.target) if self.target is not None else None
            if spent and method.value_mean is not None:
                x = {"rounds": spent.rounds, "bytes": spent.bytes, "time": spent.seconds / self.clock[1]}[over]
                mean, spread = method.value_mean, method.value_std or 0.0
                points.append({"method": label, "x": x, "mean": mean, "low": mean - spread, "high": mean + spread})
        return points

    @cached_property
    def heatmaps(self) -> dict[str, Rows]:
        """The data of the charts that do not depend on the method."""
        result: dict[str, Rows] = {}
        if any(self.deviation.values()):
            result["deviation"] = [
                {"method": _tau_label(tau), "x": x, "mean": value, "low": value, "high": value}
                for tau, points in self.deviation.items()
                for x, value in points
            ]
            ends = {row["x"] for row in result["deviation"]}
            result["deviation"] += [
                {"method": NO_MOMENTUM, "x": x, "mean": 1.0, "low": 1.0, "high": 1.0} for x in (min(ends), max(ends))
            ]
        if self.cohort_run:
            result["participation"] = _participation(self.cohort_run)
        if self.client_statistics:
            result["label-distribution"] = _label_shares(self.client_statistics["picture"])
        return result

    @cached_property
    def differing(self) -> tuple[list[str], list[list[str]]]:
        """All fields that differ between the methods, and a row of values for each method."""
        flat = [flatten(method.shared) for method in self.methods]
        keys = varied_fields(flat)
        return keys, [[str(table.get(key, "")) for key in keys] for table in flat]

    @cached_property
    def commands(self) -> list[list[tuple[int, list[str], str]]]:
        """For each method and seed, the command that repeats the run, and what the command requires."""
        commands = RerunCommands()
        return [
            [(seed, *commands.of(run)) for seed, run in zip(method.seeds, method.runs, strict=True)]
            for method in self.methods
        ]


def sections(comparison: Comparison, deviation: Deviation | None = None) -> list[Section]:
    """Return a section for each setting of the comparison; the first one shows the deviation, if there is one."""
    points = max(2, min(POINTS, ALL_POINTS // len(comparison.methods)))
    result: list[Section] = []
    for setting in comparison.settings:
        methods = [comparison.methods[index] for index in setting.indices]
        base = comparison.baseline_of(methods[0])
        baseline = None if base is None else next(i for i, method in enumerate(methods) if method is base)
        target = comparison.targets[setting.indices[0]]
        shown = deviation or {} if not result else {}
        result.append(Section(setting, methods, setting.labels, baseline, target, points, shown))
    return result


def _tau_label(tau: int) -> str:
    return f"τ = {tau}: the last {f'{tau} rounds' if tau > 1 else 'round'}"


def _thin(count: int, limit: int) -> np.ndarray:
    """Return at most `limit` evenly spaced indices below `count`, the last one included."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))


def _short(values: np.ndarray) -> list[float | None]:
    """Round to five digits, more than a screen shows; None for what is not finite."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _over_seeds(values: np.ndarray) -> dict[str, list[float | None]]:
    """Return mean, low and high over seeds; for one seed the mean alone."""
    if len(values) < 2:
        return {"mean": _short(values.reshape(-1))}
    return {"mean": _short(values.mean(0)), "low": _short(values.min(0)), "high": _short(values.max(0))}


def _bands(series: dict[str, list[float | None]]) -> list[list[float | None]]:
    return [series.get(name, series["mean"]) for name in ("mean", "low", "high")]


def _has_values(source: list[Columns], name: str) -> bool:
    found = (columns["series"][name] for columns in source if name in columns.get("series", {}))
    return any(value is not None for series in found for value in series["mean"])


def _recorded(method: Method, points: int) -> Columns:
    """Return the drift of a method over rounds, and the angle of its momentum."""
    histories = [run.history for run in method.runs if run.history.length]
    names = [name for name in ("drift", "momentum_angle") if any(name in history.columns for history in histories)]
    if not names:
        return {}
    kept = _thin(min(history.length for history in histories), points)
    series = {name: _over_seeds(np.array([history.column(name)[kept] for history in histories])) for name in names}
    return {"rounds": (kept + 1).tolist(), "series": series}


def _chart_name(metric: str) -> str:
    return f"other-{metric}"


def _columns(series: Series, points: int) -> Columns:
    """Return a series over rounds."""
    kept = _thin(len(series.rounds), points)
    return {"rounds": series.rounds[kept].tolist(), "series": {"value": _over_seeds(series.values[:, kept])}}


def _deciles(method: Method, points: int) -> Columns:
    """Return the mean over clients, the worst and the best decile over rounds: means over seeds."""
    of_clients = [method.clients[name] for name in DECILES]
    rounds = reduce(np.intersect1d, [series.rounds for series in of_clients])
    rounds = rounds[_thin(len(rounds), points)]
    mean, worst, best = (
        _short(series.values[:, np.searchsorted(series.rounds, rounds)].mean(0)) for series in of_clients
    )
    return {"rounds": rounds.tolist(), "series": {"value": {"mean": mean, "low": worst, "high": best}}}


def _label_shares(picture: dict[str, Any]) -> Rows:
    """Return the share of each class in the examples of each client."""
    clients, classes = picture_labels(picture)
    return [
        {"client": client, "class": label, "examples": count, "share": round(count / total, 3)}
        for client, row, total in zip(clients, picture["counts"], picture["examples"], strict=True)
        for label, count in zip(classes, row, strict=True)
        if count
    ]


def _participation(run: LoadedRun) -> Rows:
    """Return how often clients participate; where there are many, clients and rounds are grouped."""
    history, statistics = run.history, run.client_statistics
    clients = max(statistics["clients"] if statistics else 0, 1 + int(history.cohorts.max()))
    wide, high = -(-history.length // ROUNDS), -(-clients // CLIENTS)
    cells = np.stack([np.repeat(np.arange(history.length) // wide, history.cohort_sizes), history.cohorts // high])
    groups, times = np.unique(cells, axis=1, return_counts=True)
    return [
        {
            "round": 1 + wide * column,
            "round_end": 1 + wide * (column + 1),
            "client": high * row,
            "client_end": high * (row + 1),
            "times": count,
        }
        for column, row, count in zip(*groups.tolist(), times.tolist(), strict=True)
    ]
