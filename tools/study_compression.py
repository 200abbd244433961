"""Accuracy against bytes: the runs, the tables and the chart of docs/compression.md.

python tools/study_compression.py run       run what is missing; write results/compression.json
python tools/study_compression.py report    draw the chart and write the tables of the page
"""

import json
import sys
from pathlib import Path
from typing import Any

import altair as alt
from digits_study import Points, Row, accuracy_text, is_measured, run_study, summary, write_section

from keel.report.charts import COLOURS

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results/compression.json", ROOT / "docs/compression.md"
CHART = ROOT / "docs/images/compression_bytes.svg"
RATES = (0.3, 0.5, 0.7)
METHODS = {"FedAvg": "fedavg", "GHBM": "ghbm", "FedHBM": "fedhbm"}
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8 up and down": {"up": "int8", "down": "int8"},
    "int4 up and down": {"up": "int4", "down": "int4"},
    "top-k 5 % up, int4 down": {"up": "top_k", "fraction": 0.05, "down": "int4"},
    "sign up, int4 down": {"up": "sign", "down": "int4"},
    "top-k 1 % up, int4 down": {"up": "top_k", "fraction": 0.01, "down": "int4"},
    "random-k 10 % up, int4 down": {"up": "random_k", "fraction": 0.1, "down": "int4"},
    "top-k 1 % up, int4 down, no feedback": {"up": "top_k", "fraction": 0.01, "down": "int4", "error_feedback": False},
    "sign up, int4 down, no feedback": {"up": "sign", "down": "int4", "error_feedback": False},
    "random-k 10 % up, int4 down, no feedback": {
        "up": "random_k",
        "fraction": 0.1,
        "down": "int4",
        "error_feedback": False,
    },
}
"""The fields of `[compression]`."""


def points() -> Points:
    return {
        f"{method}: {codec}": {"algorithm.name": name} | {f"compression.{k}": v for k, v in fields.items()}
        for codec, fields in CODECS.items()
        for method, name in METHODS.items()
    }


def results() -> dict[tuple[str, str], Row]:
    """The summary of each codec and method that has all its seeds."""
    rows = json.loads(RESULTS.read_text())
    names = {(codec, method): f"{method}: {codec}" for codec in CODECS for method in METHODS}
    return {key: summary(rows, name) for key, name in names.items() if is_measured(rows, name)}


def table(measured: dict[tuple[str, str], Row]) -> str:
    lines = ["| codec | " + " | ".join(METHODS) + " |", "|---|" + "---|" * len(METHODS)]
    for codec in CODECS:
        cells = []
        for method in METHODS:
            result, whole = measured.get((codec, method)), measured.get(("none", method))
            if result is None or whole is None:
                cells.append("not measured")
            else:
                cells.append(f"{accuracy_text(result)} ({whole['bytes'] / result['bytes']:.1f}x)")
        lines.append(f"| {codec} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: dict[tuple[str, str], Row]) -> None:
    """Draw the final accuracy against the bytes of the run, with 95 % intervals, for codecs with error feedback."""
    values = [
        {
            "method": method,
            "codec": codec,
            "megabytes": result["bytes"] / 1e6,
            "accuracy": result["final"],
            "low": result["final"] - result["final_half_width"],
            "high": result["final"] + result["final_half_width"],
        }
        for (codec, method), result in measured.items()
        if "error_feedback" not in CODECS[codec]
    ]
    shown = [codec for codec, fields in CODECS.items() if "error_feedback" not in fields]
    percent = {"title": "final accuracy", "axis": alt.Axis(format="%"), "scale": alt.Scale(zero=False)}
    base = alt.Chart(alt.InlineData(values=values)).encode(
        x=alt.X(
            "megabytes:Q",
            scale=alt.Scale(type="log", nice=False, padding=20),
            axis=alt.Axis(values=[5, 10, 20, 50, 100]),
            title="megabytes of 200 rounds",
        ),
        color=alt.Color("method:N", title=None, scale=alt.Scale(domain=list(METHODS), range=COLOURS[:3])),
    )
    shape = alt.Shape("codec:N", title=None, sort=shown)
    points = base.mark_point(size=80, strokeWidth=2).encode(y=alt.Y("accuracy:Q", **percent), shape=shape)
    intervals = base.mark_rule().encode(y=alt.Y("low:Q", **percent), y2="high:Q")
    chart = alt.layer(intervals, points).properties(width=480, height=300)
    chart.configure_legend(orient="right", labelLimit=300).save(CHART)


def report() -> None:
    measured = results()
    draw(measured)
    write_section(PAGE, f"{table(measured)}\n\n![Accuracy against bytes](images/{CHART.name})")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run"]:
            run_study(RESULTS, points(), RATES, batch=len(METHODS))
        case ["report"]:
            report()
        case _:
            sys.exit(__doc__)
