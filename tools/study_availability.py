"""tau under drop-out and diurnal availability: the runs, the table and the chart of docs/availability.md.

python tools/study_availability.py run       run what is missing; write results/availability.json
python tools/study_availability.py report    draw the chart and write the tables of the page
"""

import json
import sys
from pathlib import Path
from typing import Any

import altair as alt
from digits_study import Points, Row, accuracy_text, is_measured, run_study, summary, write_section

from keel.report.charts import COLOURS

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results/availability.json", ROOT / "docs/availability.md"
CHART = ROOT / "docs/images/availability_tau.svg"
DAY = {"availability.diurnal_rounds": 24.0}
CONDITIONS: dict[str, dict[str, Any]] = {
    "all answer": {},
    "drop-out 0.7": {"availability.dropout": 0.7},
    "diurnal, one time zone": DAY,
    "diurnal, all time zones": {**DAY, "availability.diurnal_spread": 1.0},
}
"""The fields of each condition. In the diurnal ones half of the cohort is online on average."""
PERIODS = {name: 10 / share for name, share in zip(CONDITIONS, (1, 0.3, 0.5, 0.5), strict=True)}
"""The expected number of rounds between two answers of a client: 1/C over the share that answers."""
RATES = (0.1, 0.3, 0.5, 0.7)
TAUS = (5, 10, 20, 40)
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm.name": "fedavg"},
    **{f"GHBM, tau = {tau}": {"algorithm.name": "ghbm", "algorithm.tau": tau} for tau in TAUS},
    "FedHBM, actual": {"algorithm.name": "fedhbm", "algorithm.tau_i": "actual"},
    "FedHBM, expected": {"algorithm.name": "fedhbm", "algorithm.tau_i": "expected"},
}


def points() -> Points:
    return {
        f"{condition}: {method}": {**fields, **settings}
        for condition, settings in CONDITIONS.items()
        for method, fields in METHODS.items()
    }


def results() -> dict[tuple[str, str], Row]:
    """The summary of each condition and method that has all its seeds."""
    rows = json.loads(RESULTS.read_text())
    names = {(condition, method): f"{condition}: {method}" for condition in CONDITIONS for method in METHODS}
    return {key: summary(rows, name) for key, name in names.items() if is_measured(rows, name)}


def table(measured: dict[tuple[str, str], Row]) -> str:
    lines = ["| method | " + " | ".join(f"{c} (period {PERIODS[c]:.0f})" for c in CONDITIONS) + " |"]
    lines.append("|---|" + "---|" * len(CONDITIONS))
    for method in METHODS:
        cells = []
        for condition in CONDITIONS:
            result = measured.get((condition, method))
            rounds = "never" if result and not result["rounds_to_target"] else result and result["rounds_to_target"]
            cells.append("not measured" if result is None else f"{accuracy_text(result)} ({rounds})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: dict[tuple[str, str], Row]) -> None:
    """Draw the accuracy over all rounds against tau, with 95 % intervals."""
    values = []
    for condition in CONDITIONS:
        for tau in TAUS:
            if (result := measured.get((condition, f"GHBM, tau = {tau}"))) is not None:
                mean, spread = result["overall"], result["overall_half_width"]
                interval = {"low": mean - spread, "high": mean + spread}
                values.append({"condition": condition, "tau": tau, "accuracy": mean, **interval})
    x = alt.X(
        "tau:Q",
        scale=alt.Scale(type="log", nice=False, padding=25),
        axis=alt.Axis(values=list(TAUS)),
        title="tau of GHBM",
    )
    percent = {"title": "accuracy over all rounds", "axis": alt.Axis(format="%"), "scale": alt.Scale(zero=False)}
    color = alt.Color("condition:N", title=None, scale=alt.Scale(domain=list(CONDITIONS), range=COLOURS[:4]))
    base = alt.Chart(alt.InlineData(values=values)).encode(x=x, color=color)
    lines = base.mark_line(strokeWidth=2, point=True).encode(y=alt.Y("accuracy:Q", **percent))
    intervals = base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", **percent), y2="high:Q")
    chart = alt.layer(lines, intervals).properties(width=560, height=240)
    chart.configure_legend(orient="top", columns=2).save(CHART)


def report() -> None:
    measured = results()
    draw(measured)
    write_section(PAGE, f"{table(measured)}\n\n![Accuracy of GHBM against tau](images/{CHART.name})")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run"]:
            run_study(RESULTS, points(), RATES, batch=len(METHODS))
        case ["report"]:
            report()
        case _:
            sys.exit(__doc__)
