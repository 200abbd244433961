"""Charts as Vega-Lite through Altair, told apart by colours and line styles that colour-blind eyes see too.

They name their data (ROWS) and hold none, so that the page can fill in what its reader picks.
"""

from dataclasses import dataclass
from typing import Any

import altair as alt

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The Vega-Lite that Altair writes is the one that is drawn."""

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C6D1F"]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
ROWS, TARGETS = "rows", "targets"
NAMED = 6
"""Points of a chart up to which each has its name beside it."""

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
"""How a chart looks outside the page."""


@dataclass(frozen=True)
class Quantity:
    """What an axis shows."""

    title: str
    format: str
    label: str | None = None
    """The expression of an axis label where `format` is not enough."""
    step: float | None = None
    """Between two labels at the least."""

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
ACCURACY = Quantity("test accuracy", ".1%", "format(datum.value, '.1~%')", step=0.001)
FINAL = Quantity("final accuracy", ".1%", "format(datum.value, '.1~%')", step=0.001)
LOSS = Quantity("test loss", ".3~g")
DRIFT = Quantity("mean distance from the server's model", ".3~g")
ANGLE = Quantity("angle, degrees", ".3~g")
ABOVE_LEAST = Quantity("loss above its least value", ".0e")
DEVIATION = Quantity("deviation, relative", ".3~g")


def time(unit: str) -> Quantity:
    return Quantity(f"time, {unit}", ",.3~f")


def lines(
    labels: list[str], x: Quantity, y: Quantity, points: bool = False, target: bool = False, live: bool = False
) -> alt.LayerChart:
    """A line through each method's `mean` over `x`, in a band from `low` to `high`.

    `points` marks them, as a line through one cannot be seen; `target` adds a rule at each of TARGETS. A `live` chart
    shows the values nearest to the pointer.
    """
    rows = alt.Chart(alt.NamedData(name=ROWS))
    shown = alt.Y(title=y.title, axis=y.axis, scale=alt.Scale(zero=False))
    band = rows.mark_area(opacity=0.14).encode(y=shown.field("low").type("quantitative"), y2="high:Q")
    line = rows.mark_line(strokeWidth=2, point=points).encode(y="mean:Q", strokeDash=_dash(labels))
    layers: list[Any] = [band, line]
    if live:
        near = alt.selection_point(
            "near", on="pointerover", clear="pointerout", nearest=True, fields=["method", "x"], empty=False
        )
        values = [x.tooltip("x"), y.tooltip("mean"), y.tooltip("low", "lowest seed"), y.tooltip("high", "highest seed")]
        point = rows.mark_point(filled=True, size=70).encode(
            y="mean:Q",
            opacity=alt.condition(near, alt.value(1), alt.value(0)),
            tooltip=[alt.Tooltip("method:N"), *values],
        )
        layers.append(point.add_params(near))
    over = alt.X("x:Q", title=x.title, axis=x.axis, scale=alt.Scale(zero=False, nice=False))
    layers = [layer.encode(x=over, color=_colour(labels)) for layer in layers]
    if target:
        rule = alt.Chart(alt.NamedData(name=TARGETS)).mark_rule(strokeDash=[4, 4], color="#888888")
        layers.append(rule.encode(y="target:Q"))
    return alt.LayerChart(layer=layers).properties(width="container", height=340)


def falling(labels: list[str], x: Quantity, y: Quantity) -> alt.LayerChart:
    """A line through each method's `mean` over `x`, on a logarithmic scale."""
    rows = alt.Chart(alt.NamedData(name=ROWS))
    shown = alt.Y("mean:Q", title=y.title, axis=y.axis, scale=alt.Scale(type="log"))
    line = rows.mark_line(strokeWidth=2).encode(
        x=alt.X("x:Q", title=x.title, axis=x.axis), y=shown, color=_colour(labels), strokeDash=_dash(labels)
    )
    return alt.LayerChart(layer=[line]).properties(width="container", height=340)


def by_value(labels: list[str], values: list[str], title: str, y: Quantity) -> alt.LayerChart:
    """A line through each method's `mean` at each of a few `values`, which stand side by side whatever lies between."""
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("x:O", title=title, scale=alt.Scale(domain=values), axis=alt.Axis(labelAngle=0)),
        color=_colour(labels),
    )
    shown = alt.Y("mean:Q", title=y.title, axis=y.axis, scale=alt.Scale(zero=False))
    line = rows.mark_line(strokeWidth=2, point=True).encode(y=shown, strokeDash=_dash(labels))
    spread = rows.mark_rule(strokeWidth=2, opacity=0.4).encode(y=alt.Y("low:Q", title=y.title), y2="high:Q")
    return alt.LayerChart(layer=[spread, line]).properties(width="container", height=340)


def cost_and_quality(labels: list[str], x: Quantity, y: Quantity) -> alt.LayerChart:
    """A point for each method: what it spent, `x`, against its final accuracy, `mean` with `low` to `high`."""
    rows = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("x:Q", title=f"until the target: {x.title}", axis=x.axis, scale=alt.Scale(zero=False, padding=72))
    )
    colour = _colour(labels)
    shown = alt.Y("mean:Q", title=y.title, axis=y.axis, scale=alt.Scale(zero=False, padding=24))
    spread = rows.mark_rule(strokeWidth=2, opacity=0.5).encode(
        color=colour, y=alt.Y("low:Q", title=y.title), y2="high:Q"
    )
    spreads = [y.tooltip("low", "less the deviation"), y.tooltip("high", "with the deviation")]
    values = [x.tooltip("x"), y.tooltip("mean"), *spreads]
    point = rows.mark_point(filled=True, size=110, opacity=1).encode(
        color=colour, y=shown, tooltip=[alt.Tooltip("method:N"), *values]
    )
    name = (
        rows.transform_joinaggregate(n="count()")
        .mark_text(align="left", dx=9, dy=-9, fontSize=12, limit=180)
        .encode(y=shown, text=alt.condition(f"datum.n <= {NAMED}", "method:N", alt.value("")))
    )
    return alt.LayerChart(layer=[spread, point, name]).properties(width="container", height=300)


def who_holds_what(clients: list[str], classes: list[str]) -> alt.Chart:
    """Clients by classes: the `share` of a client's examples that each class has."""
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


def who_took_part() -> alt.Chart:
    """Clients by rounds: how often the clients of a row took part in the rounds of a column."""
    return (
        alt.Chart(alt.NamedData(name=ROWS))
        .mark_rect()
        .encode(
            x=alt.X("round:Q", title="round", scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(grid=False)),
            x2="round_end:Q",
            y=alt.Y("client:Q", title="client", scale=alt.Scale(nice=False, reverse=True), axis=alt.Axis(grid=False)),
            y2="client_end:Q",
            color=alt.Color("times:Q", title="times", scale=alt.Scale(domainMin=0)),
            tooltip=[
                alt.Tooltip("round:Q", title="from round"),
                alt.Tooltip("client:Q", title="from client"),
                "times:Q",
            ],
        )
        .properties(width="container", height=300)
    )


def colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def dashes(count: int) -> list[list[int]]:
    """Another line style each time that a colour comes back."""
    return [DASHES[(i + i // len(COLOURS)) % len(DASHES)] for i in range(count)]


def _colour(labels: list[str]) -> alt.Color:
    return alt.Color("method:N", title=None, scale=alt.Scale(domain=labels, range=colours(len(labels))))


def _dash(labels: list[str]) -> alt.StrokeDash:
    return alt.StrokeDash("method:N", title=None, scale=alt.Scale(domain=labels, range=dashes(len(labels))))
