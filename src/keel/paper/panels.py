"""The figures of a result: panels with their data, and the panels side by side as one Vega-Lite chart."""

from collections.abc import Callable
from typing import Any

from keel.paper.claims import CLASSICAL, FAMILY
from keel.paper.ladder import rank_ladder
from keel.paper.results import Result, Row, seed_values
from keel.paper.sheets import axis_value
from keel.report import charts
from keel.report.altair_adapter import alt
from keel.report.significance import paired_difference

PANEL_WIDTH, PANEL_HEIGHT = 380, 260
ROW_HEIGHT, DIFFERENCE_HEIGHT = 22, 11
"""Pixels of a method in the panels of ranks and of differences."""
SHOWN = ("scaffold", "fedacg", "fedcm", "ghbm_lookahead")
"""The methods whose differences are drawn together with those of the GHBM family."""
WORST = 10.0
"""The loss of accuracy, in points, from which on the colours of a heat map do not differ."""
MAXIMUM_CURVES = 10
"""A panel with more methods shows the curves of FedAvg and of the best ones."""

Panel = dict[str, Any]
"""The form, title, labels and rows of a chart."""


def curve_panels(result: Result) -> list[Panel]:
    """Return a panel of accuracy over rounds for each part."""
    return [
        {
            "title": part["title"],
            "form": "accuracy",
            "labels": [row["label"] for row in shown],
            "rows": [point for row in shown for point in _points(row["label"], row["curve"])],
        }
        for part in result["parts"]
        if (shown := _best([row for row in part["rows"] if "curve" in row]))
    ]


def value_panels(result: Result) -> list[Panel]:
    """Return a panel of final accuracy against a field for each part; a method without the field is a level line."""
    name = result["against"].rpartition(".")[2]
    panels = []
    for part in result["parts"]:
        values = list(dict.fromkeys(v for row in part["rows"] if (v := axis_value(result, row)) is not None))
        finished = [row for row in part["rows"] if row.get("accuracy_mean") is not None]
        rows = [point for row in finished for point in _value_points(row, axis_value(result, row), values)]
        if rows:
            labels = list(dict.fromkeys(row["method"] for row in rows))
            form = {"form": "values", "values": values, "x": name}
            panels.append({"title": part["title"], **form, "labels": labels, "rows": rows})
    return panels


def _value_points(row: Row, value: str | None, values: list[str]) -> list[Row]:
    mean, spread = row["accuracy_mean"], row["accuracy_std"] or 0.0
    if value is None:
        return [{"method": row["label"], "x": x, "mean": mean} for x in values]
    label = row["label"] if row["values"] else row["label"].split()[0]
    band = {"low": max(0.0, mean - spread), "high": min(1.0, mean + spread)}
    return [{"method": label, "x": value, "mean": mean, **band}]


def against_panels(result: Result) -> list[Panel]:
    """Return the panels against a field, after the curves if the field is a method's hyper-parameter."""
    return [*(curve_panels(result) if shows_curves(result) else []), *value_panels(result)]


def shows_curves(result: Result) -> bool:
    """Return whether the figure has panels of accuracy over rounds."""
    over = any(row["values"] for part in result["parts"] for row in part["rows"])
    return result["view"] == "curves" or (result["view"] == "against" and not over)


def deviation_panels(result: Result) -> list[Panel]:
    """Return a panel of the deviation over rounds for each part, with a curve per tau."""
    panels = []
    for part in result["parts"]:
        if deviation := part["rows"][0].get("deviation", {}):
            rows = [point for tau, series in deviation.items() for point in _points(f"tau = {tau}", series)]
            labels = [f"tau = {tau}" for tau in deviation]
            panels.append({"title": part["title"], "form": "deviation", "labels": labels, "rows": rows})
    return panels


def ladder_panels(result: Result) -> list[Panel]:
    """Return a panel of mean ranks, and panels of paired differences from FedAvg and the best classical momentum."""
    return [*_rank_panel(result), *_difference_panels(result)]


def _rank_panel(result: Result) -> list[Panel]:
    ranking = rank_ladder(result)
    if ranking is None:
        return []
    algorithms = {row["label"]: row.get("algorithm") for part in result["parts"] for row in part["rows"]}
    points = [
        {"method": label, "x": round(rank, 3), "highlighted": algorithms[label] in FAMILY}
        for label, rank in ranking.ranks.items()
    ]
    right = max(ranking.ranks.values()) + 0.5
    bars = [
        {"method": label, "bar": round(right + 0.35 * number, 3), "group": number}
        for number, group in enumerate(ranking.groups)
        for label in group
    ]
    title = f"Mean ranks over {ranking.tasks} tasks"
    height = ROW_HEIGHT * len(points)
    return [{"title": title, "form": "ranks", "methods": list(ranking.ranks), "rows": points + bars, "height": height}]


def _difference_panels(result: Result) -> list[Panel]:
    references: list[tuple[str, Callable[[list[Row]], Row | None]]] = [
        ("FedAvg", lambda rows: _most_accurate(rows, ("fedavg",))),
        ("the best classical momentum of the task", lambda rows: _most_accurate(rows, CLASSICAL)),
    ]
    panels = []
    for name, reference_of in references:
        rows = []
        for part in result["parts"]:
            finished = [row for row in part["rows"] if row.get("accuracy_mean") is not None]
            reference = reference_of(finished)
            shown = [row for row in finished if row["algorithm"] in (*FAMILY, *SHOWN) and row is not reference]
            if reference is not None:
                rows += [point for row in shown for point in _difference_points(part["title"], row, reference)]
        if rows:
            labels, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "task"))
            height = max(PANEL_HEIGHT, DIFFERENCE_HEIGHT * len(labels) * len(tasks))
            form = {"form": "differences", "tasks": tasks, "x": f"points above {name}", "height": height}
            panels.append({"title": f"Compared with {name}", **form, "labels": labels, "rows": rows})
    return panels


def _most_accurate(rows: list[Row], algorithms: tuple[str, ...]) -> Row | None:
    return max((row for row in rows if row["algorithm"] in algorithms), key=lambda r: r["accuracy_mean"], default=None)


def _difference_points(task: str, row: Row, reference: Row) -> list[Row]:
    difference = paired_difference(seed_values(row), seed_values(reference))
    if difference is None:
        return []
    point = {"task": task, "method": row["label"], "mean": round(100 * difference.mean, 2)}
    if difference.measured:
        point |= {"low": round(100 * difference.low, 2), "high": round(100 * difference.high, 2)}
    return [point]


def heat_map_panels(result: Result) -> list[Panel]:
    """Return for each task a table of tau by participation rate: how far a tau is below the best one.

    The parts of a task differ in the participation rate.
    """
    tasks: dict[str, list[Row]] = {}
    for part in result["parts"]:
        tasks.setdefault(part["title"].rpartition(", C = ")[0], []).append(part)
    return [panel for task, parts in tasks.items() if (panel := _heat_map(task, parts))["rows"]]


def _heat_map(task: str, parts: list[Row]) -> Panel:
    rows, taus = [], []
    for part in parts:
        rate = part["spec"]["participation.rate"]
        means = {_tau(row): row["accuracy_mean"] for row in part["rows"] if row.get("accuracy_mean") is not None}
        taus += [tau for tau in means if tau not in taus]
        for tau, mean in means.items():
            below = 100 * (max(means.values()) - mean)
            cell = {"x": str(tau), "y": f"{100 * rate:g} %", "value": min(below, WORST), "text": f"{100 * mean:.1f}"}
            rows.append({**cell, "marked": tau == round(1 / rate), "dark": below < WORST / 4})
    x, y = [str(tau) for tau in sorted(taus)], list(dict.fromkeys(row["y"] for row in rows))
    return {"title": task, "form": "heat map", "x": x, "y": y, "rows": rows}


def _tau(row: Row) -> int:
    return int(dict(field.split("=") for field in row["method"].split()[1:])["algorithm.tau"])


PANELS: dict[str, Callable[[Result], list[Panel]]] = {
    "curves": curve_panels,
    "against": against_panels,
    "deviation": deviation_panels,
    "ladder": ladder_panels,
    "heat map": heat_map_panels,
}
"""By the `view` of the recipe; tables have none."""


def make_figure(panels: list[Panel], title: str) -> dict[str, Any]:
    """Return one Vega-Lite chart with the panels, two per row, and their data.

    A method has the same colour and dash in every panel.
    """
    fewest_first = sorted((panel.get("labels", []) for panel in panels), key=len)  # so that these get distinct colours
    labels = list(dict.fromkeys(label for panel_labels in fewest_first for label in panel_labels))
    return {
        "$schema": alt.SCHEMA_URL,
        "title": {"text": title, "offset": 12},
        "concat": [_with_data(_chart(panel), panel, labels) for panel in panels],
        "columns": 2,
        "resolve": {"scale": {"color": "independent", "strokeDash": "independent", "x": "independent"}},
        "config": charts.PAPER | {"legend": charts.PAPER["legend"] | {"columns": 3}},
    }


def _chart(panel: Panel) -> alt.Chart | alt.LayerChart:
    match panel["form"]:
        case "accuracy":
            return charts.lines(panel["labels"], charts.ROUNDS, charts.ACCURACY)
        case "deviation":
            return charts.lines(panel["labels"], charts.ROUNDS, charts.DEVIATION)
        case "losses":
            return charts.falling(panel["labels"], charts.ROUNDS, charts.LOSS_OVER_EXAMPLES)
        case "horizons":
            return charts.falling(panel["labels"], charts.HORIZON, charts.SQUARED_GRADIENT, log_x=True)
        case "dissimilarities":
            return charts.falling(panel["labels"], charts.DISSIMILARITY, charts.SQUARED_GRADIENT, log_x=True)
        case "ranks":
            return charts.ranks(panel["methods"])
        case "differences":
            return charts.differences(panel["labels"], panel["tasks"], panel["x"])
        case "heat map":
            titles = ("tau", "participation rate C", "points below the best tau")
            return charts.heat_map(panel["x"], panel["y"], *titles)
        case "values":
            return charts.by_value(panel["labels"], panel["values"], panel["x"], charts.FINAL)
        case _:
            return charts.participation()


def _with_data(chart: alt.Chart | alt.LayerChart, panel: Panel, labels: list[str]) -> dict[str, Any]:
    """Return the chart's specification with the panel's rows, and the styles of `labels` for its methods."""
    styles: dict[str, list[Any]] = {"color": charts.colours(len(labels)), "strokeDash": charts.dashes(len(labels))}
    spec = chart.properties(width=PANEL_WIDTH, height=panel.get("height", PANEL_HEIGHT), title=panel["title"]).to_dict()
    for key in ("$schema", "config", "datasets"):
        spec.pop(key, None)
    for layer in spec.get("layer", []):
        layer.pop("data", None)
        for channel, style in styles.items():
            if "domain" in layer["encoding"].get(channel, {}).get("scale", {}):
                scale = layer["encoding"][channel]["scale"]
                scale["range"] = [style[labels.index(label)] for label in scale["domain"]]
    return {**spec, "data": {"values": panel["rows"]}}


def _points(label: str, series: Row) -> list[Row]:
    columns = zip(series["rounds"], series["mean"], series["low"], series["high"], strict=True)
    return [{"method": label, "x": x, "mean": mean, "low": low, "high": high} for x, mean, low, high in columns]


def _best(rows: list[Row]) -> list[Row]:
    """Return FedAvg and the best methods, in their order, if there are more than MAXIMUM_CURVES."""
    if len(rows) <= MAXIMUM_CURVES:
        return rows
    ranked = sorted(rows, key=lambda row: (row["algorithm"] != "fedavg", -(row["accuracy_mean"] or 0.0)))
    return [row for row in rows if row in ranked[:MAXIMUM_CURVES]]
