"""The curves on the pages of the algorithms.

    python tools/algorithm_curves.py run    train; write results/algorithm_curves.json, then draw
    python tools/algorithm_curves.py draw   write docs/images/algorithms from results

Every method is trained on two tasks with the hyper-parameters of its search on the first (results/digits_grid.json).
The second shows what happens to them when fewer clients take part. Methods that were searched on tasks of the ladder
(results/paper/ladder.json) are drawn on those instead of the second task. Finished runs are not repeated.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiment_digits import REFERENCE, RESULTS, ROOT, best_points, shown_methods

from keel.algorithms import REGISTRY
from keel.config.defaults import make_spec
from keel.config.overrides import override
from keel.report.comparison import compare
from keel.report.drawing import draw
from keel.runs.compare import run_jobs
from keel.runs.folder import RunFolder
from keel.runs.parallel import Job

CURVES, IMAGES = RESULTS / "algorithm_curves.json", ROOT / "docs/images/algorithms"
TASKS: dict[str, dict[str, Any]] = {
    "one class per client, C = 10 %": {"rounds": 300},
    "one class per client, C = 2 %": {"rounds": 400, "participation.rate": 0.02},
}
FIRST, TRANSFERRED = TASKS
LADDER, SEARCHED = RESULTS / "paper/ladder.json", ("digits, C = 2 %", "MNIST, C = 2 %")
"""Tasks on which the methods of the ladder have hyper-parameters of their own."""
SEEDS = 3
POINTS = 60
"""Points of a curve, at most."""
COLOURS = {"fedavg": "#8b949e", "fedhbm": "#17a47a"}
COLOUR = "#3b8fd4"
"""That of the method whose page it is. All are readable on white and on black."""
INK, LINE = "#6e7781", "#8884"

Curve = dict[str, list[float]]


def points() -> dict[str, dict[str, Any]]:
    """Return the hyper-parameters of every method."""
    best = best_points(RESULTS / "digits_grid.toml")
    centralized = {field: value for field, value in REFERENCE.items() if field != "rounds"}
    return {name: best.get(name, centralized) for name in REGISTRY}


def run() -> dict[str, dict[str, Curve]]:
    """Return the curves of every method by task: the mean over the seeds, the lowest and the highest seed."""
    chosen = points()
    jobs = {(title, name): _jobs(title, name, {**chosen[name], **TASKS[title]}) for title in TASKS for name in REGISTRY}
    run_jobs([job for group in jobs.values() for job in group], quiet=False)
    curves: dict[str, dict[str, Curve]] = {title: {} for title in TASKS}
    for (title, name), group in jobs.items():
        curves[title][name] = _curve([RunFolder.open(job.path) for job in group])
    return curves


def _jobs(title: str, name: str, fields: dict[str, Any]) -> list[Job]:
    if name == "centralized":
        fields = fields | {"rounds": REFERENCE["rounds"]}
    overrides = [f"{field}={json.dumps(value)}" for field, value in fields.items()]
    specs = [make_spec(override({"algorithm": {"name": name}, "seed": seed}, overrides)) for seed in range(SEEDS)]
    folder = ROOT / "runs" / "algorithm_curves" / title.replace(" ", "-").replace(",", "")
    return [Job(spec, folder / spec.label) for spec in specs]


def _curve(folders: list[RunFolder]) -> Curve:
    [method] = compare(folders).methods
    step = -(-len(method.rounds) // POINTS)
    parts = [slice(start, start + step) for start in range(0, len(method.rounds), step)]
    curves = {"mean": method.values.mean(0), "low": method.values.min(0), "high": method.values.max(0)}
    averaged = {key: [round(float(curve[part].mean()), 4) for part in parts] for key, curve in curves.items()}
    return {"rounds": [int(method.rounds[part][-1]) for part in parts], **averaged}


def panels(name: str, curves: dict[str, dict[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """Return what a method's page shows: the curves of a few methods by the title of the task."""
    shown = shown_methods(name)
    if REGISTRY[name].pooled:
        return {"digits": {name: curves[FIRST][name]}}
    parts = {part["title"]: part for part in json.loads(LADDER.read_text(encoding="utf-8"))["parts"]}
    ladder = {title: {row["method"]: row["curve"] for row in parts[title]["rows"]} for title in SEARCHED}
    tasks = {"digits, C = 10 %": curves[FIRST]}
    if all(set(shown) <= set(rows) for rows in ladder.values()):
        tasks |= ladder
    else:
        tasks |= {"digits, C = 2 %, not searched": curves[TRANSFERRED]}
    return {title: {method: rows[method] for method in shown} for title, rows in tasks.items()}


def figure(name: str, curves: dict[str, dict[str, Curve]]) -> dict[str, Any]:
    """Return the figure of a method's page as Vega-Lite: a panel for each task."""
    shown, tasks = shown_methods(name), panels(name, curves)
    titles = {method: str(REGISTRY[method].title) for method in shown}
    range_ = [COLOURS.get(method, COLOUR) for method in shown]
    colour = {
        "field": "method",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(titles.values()), "range": range_},
    }
    return {
        "background": None,
        "config": {
            "font": "Helvetica, Arial, sans-serif",
            "view": {"stroke": None},
            "axis": {"gridColor": LINE, "domainColor": LINE, "tickColor": LINE, "labelColor": INK, "titleColor": INK},
            "legend": {
                "orient": "top",
                "labelColor": INK,
                "labelFontSize": 12,
                "symbolType": "stroke",
                "symbolOpacity": 1,
                "symbolStrokeWidth": 2.5,
            },
            "title": {"color": INK, "fontWeight": "normal", "fontSize": 12},
        },
        "hconcat": [
            _panel(title, {titles[m]: rows[m] for m in shown}, colour, 570 // len(tasks))
            for title, rows in tasks.items()
        ],
    }


def _panel(title: str, curves: dict[str, Curve], colour: dict[str, Any], width: int) -> dict[str, Any]:
    keys = ("rounds", "mean", "low", "high")
    values = [
        dict(zip(("round", "mean", "low", "high"), point, strict=True), method=method)
        for method, curve in curves.items()
        for point in zip(*(curve[key] for key in keys), strict=True)
    ]
    y = {"type": "quantitative", "title": None, "scale": {"domain": [0, 1]}}
    axis = {"format": ".0%", "tickCount": 5}
    return {
        "title": title,
        "width": width,
        "height": 200,
        "data": {"values": values},
        "encoding": {
            "x": {"field": "round", "type": "quantitative", "title": "rounds", "axis": {"tickCount": 3}},
            "color": colour,
        },
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.12},
                "encoding": {"y": {"field": "low", **y, "axis": axis}, "y2": {"field": "high"}},
            },
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": {"field": "mean", **y}}},
        ],
    }


def images(names: Iterable[str]) -> dict[Path, bytes]:
    """Return the files of the methods' figures with their content."""
    curves, names = json.loads(CURVES.read_text(encoding="utf-8")), list(names)
    drawn = draw([(figure(name, curves), "svg") for name in names])
    return {IMAGES / f"{name}.svg": image for name, image in zip(names, drawn, strict=True)}


def write_images() -> None:
    for path, content in images(REGISTRY).items():
        path.write_bytes(content)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run"]:
            CURVES.write_text(json.dumps(run(), separators=(",", ":")) + "\n", encoding="utf-8")
            write_images()
        case ["draw"]:
            write_images()
        case _:
            sys.exit(__doc__)
