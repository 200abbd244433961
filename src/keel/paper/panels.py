"""The figures of a result: panels with their data, and the panels side by side as one Vega-Lite chart."""

from collections.abc import Callable
from typing import Any

import altair as alt

from keel.paper.results import Result, Row
from keel.paper.sheets import axis_value
from keel.report import charts

PANEL_WIDTH, PANEL_HEIGHT = 380, 260
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


PANELS: dict[str, Callable[[Result], list[Panel]]] = {
    "curves": curve_panels,
    "against": against_panels,
    "deviation": deviation_panels,
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
            return charts.falling(panel["labels"], charts.ROUNDS, charts.ABOVE_LEAST)
        case "values":
            return charts.by_value(panel["labels"], panel["values"], panel["x"], charts.FINAL)
        case _:
            return charts.participation()


def _with_data(chart: alt.Chart | alt.LayerChart, panel: Panel, labels: list[str]) -> dict[str, Any]:
    """Return the chart's specification with the panel's rows, and the styles of `labels` for its methods."""
    styles: dict[str, list[Any]] = {"color": charts.colours(len(labels)), "strokeDash": charts.dashes(len(labels))}
    spec = chart.properties(width=PANEL_WIDTH, height=PANEL_HEIGHT, title=panel["title"]).to_dict()
    for key in ("$schema", "config", "datasets"):
        spec.pop(key, None)
    for layer in spec.get("layer", []):
        layer.pop("data", None)
        for channel, style in styles.items():
            if channel in layer["encoding"]:
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
