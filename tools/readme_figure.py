"""Draw the figure of the README, docs/images/drift-light.svg and drift-dark.svg, from results/paper/ladder.json.

    python tools/readme_figure.py

Left: accuracy over rounds, the mean over ten seeds in a band from the lowest to the highest seed. Right: the final
accuracy, mean and standard deviation. The task is the one of `make demo`, each method at the best point of its search.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keel.report.drawing import draw

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results" / "paper" / "ladder.json"
IMAGES = ROOT / "docs" / "images"
TASK = "digits, C = 1 %"
METHODS = {"FedAvg": "#8b949e", "FedAvgM": "#c9822b", "FedCM": "#d1603d", "GHBM": "#3b8fd4", "FedHBM": "#17a47a"}
THEMES = {"light": ("#ffffff", "#1f2328", "#d5dae0"), "dark": ("#0d1117", "#e6edf3", "#30363d")}
"""The background, the text and the lines of each theme, as the README has them."""


def rows(labels: Iterable[str]) -> list[dict[str, Any]]:
    """Return the recorded rows of methods."""
    [part] = [part for part in json.loads(RESULT.read_text(encoding="utf-8"))["parts"] if part["title"] == TASK]
    found = {row["label"]: row for row in part["rows"]}
    return [found[label] for label in labels]


def figure(theme: str) -> dict[str, Any]:
    """Return the figure as Vega-Lite."""
    background, ink, line = THEMES[theme]
    colour = {
        "field": "method",
        "type": "nominal",
        "scale": {"domain": list(METHODS), "range": list(METHODS.values())},
        "legend": None,
    }
    return {
        "background": background,
        "padding": 12,
        "config": {
            "font": "Helvetica, Arial, sans-serif",
            "view": {"stroke": None},
            "axis": {
                **{"gridColor": line, "domainColor": line, "tickColor": line, "labelColor": ink, "titleColor": ink},
                **{"titleFontWeight": "normal", "labelFontSize": 14, "titleFontSize": 14, "gridOpacity": 0.7},
            },
            "title": {"color": ink, "fontWeight": "normal", "anchor": "start", "fontSize": 16},
        },
        "spacing": 28,
        "hconcat": [_curves(colour), _final(colour, ink)],
    }


def _curves(colour: dict[str, Any]) -> dict[str, Any]:
    values = [
        {"round": round_, "mean": mean, "low": low, "high": high, "method": row["label"]}
        for row in rows(METHODS)
        for round_, mean, low, high in zip(
            *(row["curve"][key] for key in ("rounds", "mean", "low", "high")), strict=True
        )
    ]
    y = {"type": "quantitative", "scale": {"domain": [0.6, 1.0]}, "title": None}
    return {
        "title": "Test accuracy over rounds",
        "width": 380,
        "height": 260,
        "data": {"values": values},
        "encoding": {
            "x": {"field": "round", "type": "quantitative", "title": "rounds", "axis": {"tickCount": 6}},
            "color": colour,
        },
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.09, "clip": True},
                "encoding": {
                    "y": {"field": "low", **y, "axis": {"format": ".0%", "tickCount": 5}},
                    "y2": {"field": "high"},
                },
            },
            {"mark": {"type": "line", "strokeWidth": 2.2, "clip": True}, "encoding": {"y": {"field": "mean", **y}}},
        ],
    }


def _final(colour: dict[str, Any], ink: str) -> dict[str, Any]:
    values = [
        {
            "method": row["label"],
            "mean": row["accuracy_mean"],
            "low": row["accuracy_mean"] - row["accuracy_std"],
            "high": row["accuracy_mean"] + row["accuracy_std"],
            "text": f"{100 * row['accuracy_mean']:.1f} %",
        }
        for row in rows(METHODS)
    ]
    y = {"field": "method", "type": "nominal", "sort": list(METHODS), "title": None}
    x = {"type": "quantitative", "scale": {"domain": [0.92, 0.98], "zero": False}, "title": None}
    axis = {"format": ".0%", "tickCount": 4}
    return {
        "title": "Final accuracy, ten seeds",
        "width": 210,
        "height": 260,
        "data": {"values": values},
        "encoding": {"y": {**y, "axis": {"domain": False, "ticks": False, **_own_colours()}}, "color": colour},
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 2.5},
                "encoding": {"x": {"field": "low", **x, "axis": axis}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {"x": {"field": "mean", **x}},
            },
            {
                "mark": {"type": "text", "dy": -13, "fontSize": 14, "color": ink},
                "encoding": {"x": {"field": "mean", **x}, "text": {"field": "text"}, "color": {"value": ink}},
            },
        ],
    }


def _own_colours() -> dict[str, Any]:
    """Return labels in the colours of the curves: they are the legend."""
    *others, (_, last) = [(f"datum.value == '{method}'", colour) for method, colour in METHODS.items()]
    conditions = [{"test": test, "value": colour} for test, colour in others]
    return {"labelFontSize": 16, "labelFontWeight": "bold", "labelColor": {"condition": conditions, "value": last}}


def images() -> dict[Path, bytes]:
    """Return the files with their content."""
    drawn = draw([(figure(theme), "svg") for theme in THEMES])
    return {IMAGES / f"drift-{theme}.svg": image for theme, image in zip(THEMES, drawn, strict=True)}


if __name__ == "__main__":
    for path, content in images().items():
        path.write_bytes(content)
