"""Charts of a comparison, as Vega-Lite through Altair. Colours tell methods apart for colour-blind eyes too."""

from typing import Any

import altair as alt

from keel.reporting.comparison import Comparison

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The Vega-Lite that Altair writes is the one that is drawn."""

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C6D1F"]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]


def curves(comparison: Comparison, over: str = "rounds") -> alt.LayerChart | alt.FacetChart:
    """Accuracy over rounds or over bytes: the mean of the seeds, the band from the lowest to the highest of them.

    A click in the legend picks a method; the dashed line is the target.
    """
    unit, divisor = _unit(comparison) if over == "bytes" else ("", 1)
    values = [
        {
            "method": method.label,
            "x": (float(method.bytes[i]) / divisor) if over == "bytes" else int(method.rounds[i]),
            "accuracy": round(float(column.mean()), 4),
            "low": round(float(column.min()), 4),
            "high": round(float(column.max()), 4),
        }
        for method in comparison.methods
        for i, column in enumerate(method.accuracy.T)
    ]
    labels = [method.label for method in comparison.methods if len(method.rounds)]
    pick = alt.selection_point(fields=["method"], bind="legend")
    base = alt.Chart(alt.InlineData(values=values)).encode(
        x=alt.X("x:Q", title=f"{unit} sent, up and down" if over == "bytes" else "round"),
        color=alt.Color("method:N", title=None, scale=alt.Scale(domain=labels, range=_cycle(COLOURS, labels))),
        opacity=alt.condition(pick, alt.value(1.0), alt.value(0.12)),
    )
    band = base.mark_area().encode(
        y=alt.Y("low:Q", title="test accuracy", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False)),
        y2="high:Q",
        opacity=alt.condition(pick, alt.value(0.13), alt.value(0.03)),
    )
    once = min(len(method.rounds) for method in comparison.methods) < 2  # a line through one point cannot be seen
    line = base.mark_line(strokeWidth=2, point=once).encode(
        y="accuracy:Q",
        strokeDash=alt.StrokeDash("method:N", title=None, scale=alt.Scale(domain=labels, range=_cycle(DASHES, labels))),
        tooltip=[
            alt.Tooltip("method:N"),
            alt.Tooltip("x:Q", title=unit or "round", format=",.3~f"),
            alt.Tooltip("accuracy:Q", format=".1%"),
            alt.Tooltip("low:Q", title="lowest seed", format=".1%"),
            alt.Tooltip("high:Q", title="highest seed", format=".1%"),
        ],
    )
    layers = [band, line.add_params(pick)]
    if targets := [{"target": target} for target in set(comparison.targets) if target is not None]:
        target = alt.Chart(alt.InlineData(values=targets))
        layers.append(target.mark_rule(strokeDash=[4, 4], color="#888888").encode(y="target:Q"))
    return alt.layer(*layers).properties(width="container", height=320)


def who_holds_what(told: dict[str, Any]) -> alt.Chart:
    """Clients by classes: the share of a client's examples that each class has."""
    picture = told["picture"]
    values = [
        {"client": str(client), "class": str(label), "examples": count, "share": round(count / total, 3)}
        for client, row, total in zip(picture["clients"], picture["counts"], picture["examples"], strict=True)
        for label, count in zip(picture["classes"], row, strict=True)
        if count
    ]
    order = [str(client) for client in picture["clients"]]
    labels = [str(label) for label in picture["classes"]]
    few = len(order) <= 20
    return (
        alt.Chart(alt.InlineData(values=values))
        .mark_rect()
        .encode(
            x=alt.X(
                "class:O", title="class", scale=alt.Scale(domain=labels), axis=alt.Axis(labelAngle=0, labelOverlap=True)
            ),
            y=alt.Y("client:O", title="client", scale=alt.Scale(domain=order), axis=alt.Axis(labels=few, ticks=few)),
            color=alt.Color("share:Q", title="share", scale=alt.Scale(scheme="blues", domainMin=0)),
            tooltip=["client:O", "class:O", "examples:Q", alt.Tooltip("share:Q", format=".0%")],
        )
        .properties(width="container", height=min(320, 24 + 12 * len(order)))
    )


def _unit(comparison: Comparison) -> tuple[str, int]:
    most = max(float(method.bytes[-1]) for method in comparison.methods if len(method.rounds))
    return next(((u, d) for u, d in (("GB", 10**9), ("MB", 10**6)) if most >= d), ("kB", 10**3))


def _cycle(values: list[Any], labels: list[str]) -> list[Any]:
    return [values[i % len(values)] for i in range(len(labels))]
