"""Charts as Vega-Lite through Altair. Colours and line styles remain distinguishable to colour-blind readers.

A chart names its data set (ROWS) and contains no data: the page fills in what the reader selects.
"""

from dataclasses import dataclass
from typing import Any

from keel.report.altair_adapter import alt

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version of Vega-Lite that Altair writes, and that the page draws."""

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C6D1F"]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
ROWS, TARGETS = "rows", "targets"
NAMED = 6
"""Maximum number of points in a chart that labels them."""

PAPER: dict[str, Any] = {
    "background": "#ffffff",
    "font": "Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e3e7ec", "domainColor": "#8b949e", "tickColor": "#8b949e", "titleFontWeight": "normal"},
    "legend": {
        "orient": "top",
        "columns": 4,
        "titleFontWeight": "normal",
        "labelLimit": 320,
        "symbolType": "stroke",
        "symbolSize": 400,
        "symbolOpacity": 1,
        "symbolStrokeWidth": 2.5,
        "gradientLength": 160,
    },
    "range": {"heatmap": {"scheme": "blues"}},
}
"""The style of a chart outside the page."""


@dataclass(frozen=True)
class Quantity:
    """The quantity on an axis."""

    title: str
    format: str
    label: str | None = None
    """Vega expression for the axis labels, where `format` is not enough."""
    step: float | None = None
    """Minimum distance between two axis labels."""

    @property
    def axis(self) -> alt.Axis:
        return alt.Axis(
            tickCount=6,
            tickMinStep=self.step or alt.Undefined,
            labelFlush=False,
            format=self.format,
            labelExpr=self.label or alt.Undefined,
        )

    def tooltip(self, field: str, title: str | None = None) -> alt.Tooltip:
        return alt.Tooltip(f"{field}:Q", title=title or self.title, format=self.format)


ROUNDS = Quantity("rounds", ",d", step=1)
BYTES = Quantity("bytes sent, up and down", ".3~s", "format(datum.value, '~s') + 'B'")
LOSS = Quantity("test loss", ".3~g")
DRIFT = Quantity("mean distance from the server model", ".3~g")
ANGLE = Quantity("angle (degrees)", ".3~g")
LOSS_OVER_EXAMPLES = Quantity("mean loss over all examples", ".0e")
HORIZON = Quantity("rounds T", ",d")
DISSIMILARITY = Quantity("gradient dissimilarity G", ",d")
SQUARED_GRADIENT = Quantity("mean squared gradient norm over T rounds", ".3~g")
DEVIATION = Quantity("distance from the direction of all clients", ".3~g")


def metric(title: str, is_fraction: bool) -> Quantity:
    """Return a metric as a quantity; fractions are in percent."""
    if is_fraction:
        return Quantity(title, ".1%", "format(datum.value, '.1~%')", step=0.001)
    return Quantity(title, ".4~g")


ACCURACY = metric("test accuracy", is_fraction=True)
FINAL = metric("final accuracy", is_fraction=True)


def time(unit: str, modelled: bool) -> Quantity:
    return Quantity(f"{'modelled' if modelled else 'measured'} wall-clock time ({unit})", ",.3~f")


def lines(
    labels: list[str], x: Quantity, y: Quantity, points: bool = False, target: bool = False, live: bool = False
) -> alt.LayerChart:
    """Draw the `mean` of each method over `x` as a line, in a band from `low` to `high`.

    Args:
        labels: The methods.
        x: The quantity on the horizontal axis.
        y: The quantity on the vertical axis.
        points: Mark the points: a line through a single point is invisible.
        target: Draw a horizontal line at each of TARGETS.
        live: Show the values nearest to the pointer.
    """
    rows = alt.Chart(alt.NamedData(name=ROWS))
    y_axis = alt.Y(title=y.title, axis=y.axis, scale=alt.Scale(zero=False))
    band = rows.mark_area(opacity=0.14).encode(y=y_axis.field("low").type("quantitative"), y2="high:Q")
    line = rows.mark_line(strokeWidth=2, point=points).encode(y="mean:Q", strokeDash=_dash(labels))
    layers: list[Any] = [band, line]
    if live:
        layers[1] = line.encode(detail="seed:N")  # readers can show the curve of each seed
        spread = [y.tooltip("low", "lowest seed"), y.tooltip("high", "highest seed")]
        layers.append(_nearest(rows, [x.tooltip("x"), y.tooltip("mean"), *spread]))
    layers = [layer.encode(x=_x_axis(x), color=_colour(labels)) for layer in layers]
    if target:
        rule = alt.Chart(alt.NamedData(name=TARGETS)).mark_rule(strokeDash=[4, 4], color="#888888")
        layers.append(rule.encode(y="target:Q"))
    return alt.LayerChart(layer=layers).properties(width="container", height=340)


def deciles(labels: list[str], x: Quantity, y: Quantity, live: bool = False) -> alt.LayerChart:
    """Draw the `mean` of each method over clients as a line over `x`, and `low`, its worst decile, as a thin line.

    Args:
        labels: The methods.
        x: The quantity on the horizontal axis.
        y: The quantity on the vertical axis.
        live: Show the values nearest to the pointer.
    """
    rows = alt.Chart(alt.NamedData(name=ROWS))
    y_axis = alt.Y(title=y.title, axis=y.axis, scale=alt.Scale(zero=False))
    mean = rows.mark_line(strokeWidth=2.5).encode(y=y_axis.field("mean").type("quantitative"), strokeDash=_dash(labels))
    worst = rows.mark_line(strokeWidth=1, opacity=0.8).encode(y="low:Q", strokeDash=_dash(labels))
    layers: list[Any] = [mean, worst]
    if live:
        spread = [y.tooltip("low", "worst decile"), y.tooltip("high", "best decile")]
        layers.append(_nearest(rows, [x.tooltip("x"), y.tooltip("mean", "mean"), *spread]))
    layers = [layer.encode(x=_x_axis(x), color=_colour(labels)) for layer in layers]
    return alt.LayerChart(layer=layers).properties(width="container", height=340)


def _x_axis(x: Quantity) -> alt.X:
    return alt.X("x:Q", title=x.title, axis=x.axis, scale=alt.Scale(zero=False, nice=False))


def _nearest(rows: alt.Chart, values: list[alt.Tooltip]) -> alt.Chart:
    """Mark the point nearest to the pointer, with a tooltip of these values."""
    near = alt.selection_point(
        "near", on="pointerover", clear="pointerout", nearest=True, fields=["method", "x"], empty=False
    )
    point = rows.mark_point(filled=True, size=70).encode(
        y="mean:Q",
        opacity=alt.condition(near, alt.value(1), alt.value(0)),
        tooltip=[alt.Tooltip("method:N"), *values],
    )
    return point.add_params(near)


def falling(labels: list[str], x: Quantity, y: Quantity, log_x: bool = False) -> alt.LayerChart:
    """Draw the `mean` of each method over `x` as a line, in a band from `low` to `high`, on a logarithmic scale.

    Args:
        labels: The methods.
        x: The quantity on the horizontal axis.
        y: The quantity on the vertical axis.
        log_x: Make the horizontal axis logarithmic too.
    """
    x_scale = alt.Scale(type="log", nice=False) if log_x else alt.Scale(nice=False)
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("x:Q", title=x.title, axis=x.axis, scale=x_scale), color=_colour(labels)
    )
    y_axis = alt.Y("low:Q", title=y.title, axis=y.axis, scale=alt.Scale(type="log"))
    band = rows.mark_area(opacity=0.14).encode(y=y_axis, y2="high:Q")
    line = rows.mark_line(strokeWidth=2).encode(y="mean:Q", strokeDash=_dash(labels))
    return alt.LayerChart(layer=[band, line]).properties(width="container", height=340)


def by_value(labels: list[str], values: list[str], title: str, y: Quantity) -> alt.LayerChart:
    """Draw the `mean` of each method at each of a few `values`, which are evenly spaced whatever their distance."""
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("x:O", title=title, scale=alt.Scale(domain=values), axis=alt.Axis(labelAngle=0)),
        color=_colour(labels),
    )
    y_axis = alt.Y("mean:Q", title=y.title, axis=y.axis, scale=alt.Scale(zero=False))
    line = rows.mark_line(strokeWidth=2, point=True).encode(y=y_axis, strokeDash=_dash(labels))
    spread = rows.mark_rule(strokeWidth=2, opacity=0.4).encode(y=alt.Y("low:Q", title=y.title), y2="high:Q")
    return alt.LayerChart(layer=[spread, line]).properties(width="container", height=340)


def cost_and_quality(labels: list[str], x: Quantity, y: Quantity) -> alt.LayerChart:
    """Draw a point for each method: what it spent until the target, `x`, and its final value, `low` to `high`."""
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("x:Q", title=f"{x.title} until the target", axis=x.axis, scale=alt.Scale(zero=False, padding=72))
    )
    colour = _colour(labels)
    y_axis = alt.Y("mean:Q", title=y.title, axis=y.axis, scale=alt.Scale(zero=False, padding=24))
    spread = rows.mark_rule(strokeWidth=2, opacity=0.5).encode(
        color=colour, y=alt.Y("low:Q", title=y.title), y2="high:Q"
    )
    spreads = [y.tooltip("low", "mean - std"), y.tooltip("high", "mean + std")]
    values = [x.tooltip("x"), y.tooltip("mean"), *spreads]
    point = rows.mark_point(filled=True, size=110, opacity=1).encode(
        color=colour, y=y_axis, tooltip=[alt.Tooltip("method:N"), *values]
    )
    name = (
        rows.transform_joinaggregate(n="count()")
        .mark_text(align="left", dx=9, dy=-9, fontSize=12, limit=180)
        .encode(y=y_axis, text=alt.condition(f"datum.n <= {NAMED}", "method:N", alt.value("")))
    )
    return alt.LayerChart(layer=[spread, point, name]).properties(width="container", height=300)


def label_distribution(clients: list[str], classes: list[str]) -> alt.Chart:
    """Draw clients by classes: the `share` of each class in the examples of a client."""
    few = len(clients) <= 20
    return (
        alt.Chart(alt.NamedData(name=ROWS))
        .mark_rect()
        .encode(
            x=alt.X(
                "class:O",
                title="class",
                scale=alt.Scale(domain=classes),
                axis=alt.Axis(labelAngle=0, labelOverlap=True, labelLimit=90),
            ),
            y=alt.Y("client:O", title="client", scale=alt.Scale(domain=clients), axis=alt.Axis(labels=few, ticks=few)),
            color=alt.Color("share:Q", title="share", scale=alt.Scale(domainMin=0)),
            tooltip=["client:O", "class:O", "examples:Q", alt.Tooltip("share:Q", format=".0%")],
        )
        .properties(width="container", height=min(320, 24 + 12 * len(clients)))
    )


def ranks(labels: list[str]) -> alt.LayerChart:
    """Draw the mean rank `x` of each method, and bars at the positions `bar` that join methods of the same `group`."""
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        y=alt.Y("method:N", title=None, scale=alt.Scale(domain=labels), axis=alt.Axis(grid=True, labelLimit=200))
    )
    title = "mean rank, best first; bars join methods that are not separated"
    x_axis = alt.X("x:Q", title=title, axis=alt.Axis(grid=False), scale=alt.Scale(domainMin=0.5, nice=False))
    point = rows.transform_filter("isValid(datum.x)").mark_point(filled=True, size=90, opacity=1).encode(x=x_axis)
    point = point.encode(fill=_highlight(), tooltip=["method:N", alt.Tooltip("x:Q", title="mean rank", format=".2f")])
    bar = rows.transform_filter("isValid(datum.bar)").mark_line(strokeWidth=4, color="#8b949e", strokeCap="round")
    return alt.LayerChart(layer=[bar.encode(x=alt.X("bar:Q", title=title), detail="group:N"), point])


def _highlight() -> alt.Fill:
    """Colour what is `highlighted`."""
    return alt.Fill("highlighted:N", legend=None, scale=alt.Scale(domain=[True, False], range=[COLOURS[1], COLOURS[0]]))


def differences(labels: list[str], tasks: list[str], title: str) -> alt.LayerChart:
    """Draw the difference `mean` of each method from a reference in each task, with its interval `low` to `high`."""
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        y=alt.Y("task:N", title=None, scale=alt.Scale(domain=tasks), axis=alt.Axis(labelLimit=260, grid=True)),
        yOffset=alt.YOffset("method:N", scale=alt.Scale(domain=labels, paddingOuter=0.25)),
        color=_colour(labels),
    )
    values = [alt.Tooltip(f"{name}:Q", format="+.1f") for name in ("mean", "low", "high")]
    interval = rows.mark_rule(strokeWidth=2, opacity=0.6).encode(x=alt.X("low:Q", title=title), x2="high:Q")
    point = rows.mark_point(filled=True, size=45, opacity=1).encode(
        x=alt.X("mean:Q", title=title), tooltip=["task:N", "method:N", *values]
    )
    zero = alt.Chart(alt.NamedData(name=ROWS)).mark_rule(color="#444444").encode(x=alt.datum(0, title=title))
    return alt.LayerChart(layer=[zero, interval, point])


def heat_map(x: list[str], y: list[str], x_title: str, y_title: str, title: str) -> alt.LayerChart:
    """Draw a table of `value`s with their `text`; a frame marks the cells that are `marked`."""
    cells = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("x:O", title=x_title, scale=alt.Scale(domain=x), axis=alt.Axis(labelAngle=0)),
        y=alt.Y("y:O", title=y_title, scale=alt.Scale(domain=y)),
    )
    colour = alt.Color("value:Q", title=title, scale=alt.Scale(reverse=True))
    rectangles = cells.mark_rect().encode(color=colour, tooltip=["x:O", "y:O", "text:N"])
    frames = cells.mark_rect(filled=False, stroke="#D55E00", strokeWidth=3, opacity=1).transform_filter("datum.marked")
    texts = cells.mark_text(fontSize=11).encode(
        text="text:N", color=alt.condition("datum.dark", alt.value("#ffffff"), alt.value("#24292f"))
    )
    return alt.LayerChart(layer=[rectangles, frames, texts])


def participation() -> alt.Chart:
    """Draw clients by rounds: how often the clients of a row participate in the rounds of a column."""
    return (
        alt.Chart(alt.NamedData(name=ROWS))
        .mark_rect()
        .encode(
            x=alt.X("round:Q", title="round", scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(grid=False)),
            x2="round_end:Q",
            y=alt.Y("client:Q", title="client", scale=alt.Scale(nice=False, reverse=True), axis=alt.Axis(grid=False)),
            y2="client_end:Q",
            color=alt.Color("times:Q", title="participations", scale=alt.Scale(domainMin=0)),
            tooltip=[
                alt.Tooltip("round:Q", title="from round"),
                alt.Tooltip("client:Q", title="from client"),
                alt.Tooltip("times:Q", title="participations"),
            ],
        )
        .properties(width="container", height=300)
    )


def colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def dashes(count: int) -> list[list[int]]:
    """Return line styles; a repeated colour gets another style."""
    return [DASHES[(i + i // len(COLOURS)) % len(DASHES)] for i in range(count)]


def _colour(labels: list[str]) -> alt.Color:
    return alt.Color("method:N", title=None, scale=alt.Scale(domain=labels, range=colours(len(labels))))


def _dash(labels: list[str]) -> alt.StrokeDash:
    return alt.StrokeDash("method:N", title=None, scale=alt.Scale(domain=labels, range=dashes(len(labels))))
