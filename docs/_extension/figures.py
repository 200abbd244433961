"""The figures of the concepts page: each is computed by Keel when the site is built.

The text and the axes have the colour of the page's text, so that a figure suits the light and the dark theme.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

import keel
from _extension.running import empty_folder
from keel.report.drawing import draw

INK, LINE = "currentColor", "#8886"
COLOURS = ["#3b8fd4", "#e0702a", "#17a47a", "#c874a8"]
"""Readable on white and on black."""
CONFIG: dict[str, Any] = {
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "gridColor": LINE,
        "domainColor": LINE,
        "tickColor": LINE,
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "gridOpacity": 0.5,
    },
    "legend": {
        "orient": "top",
        "labelColor": INK,
        "titleColor": INK,
        "symbolStrokeWidth": 2.5,
        "titleFontWeight": "normal",
        "columnPadding": 24,
        "labelFontSize": 12,
    },
    "title": {"color": INK, "fontWeight": "normal", "anchor": "start"},
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12},
    "text": {"color": INK},
    "range": {"category": COLOURS},
}
Figure = tuple[dict[str, Any], str]
"""A chart as Vega-Lite, and its caption."""


def markdown(name: str) -> str:
    """Compute a figure, and return it as HTML with its caption."""
    with empty_folder():
        chart, caption = FIGURES[name]()
    [image] = draw([({"config": CONFIG, **chart}, "svg")])
    svg = re.sub(r"\s*\n\s*", "", image.decode())
    return f'<figure class="computed">{svg}<figcaption>{caption}</figcaption></figure>\n'


class _Models(keel.Observer):
    """Keeps the server's model before each round, and the local models after it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.deltas: list[Tensor] = []

    def round_started(self, round: int) -> None:
        self.deltas = []

    def client_reported(self, client: int, weight: float, result: Any) -> None:
        self.deltas.append(result.message["delta"].clone())

    def round_ended(self, event: Any) -> None:
        theta = event.state.server["theta"]
        self.steps += [_segment(theta, theta - delta, "local training") for delta in self.deltas]
        self.steps.append(_segment(theta, event.server["theta"], "the server's model"))


def _segment(start: Tensor, end: Tensor, kind: str) -> dict[str, Any]:
    values = dict(zip(("x", "y", "x2", "y2"), [*start.tolist(), *end.tolist()], strict=True))
    return {**values, "line": kind}


ANGLES = np.deg2rad([20.0, 110.0, 200.0, 290.0])


def drift() -> Figure:
    """Two parameters, four clients: the paths of the models with all clients and with one client per round."""
    rng = np.random.default_rng(0)
    optima = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1)
    inputs = np.concatenate(
        [rng.normal(size=(24, 2)) * (1.3 if k % 2 else 0.7, 0.7 if k % 2 else 1.3) for k in range(4)]
    )
    client = np.repeat(np.arange(4), 24)
    targets = (inputs * optima[client]).sum(1, keepdims=True)
    data = keel.federate(inputs, targets, keys=client, test=(inputs, targets))
    rows = []
    for title, rate in PATHS:
        models, module = _Models(), nn.Linear(2, 1, bias=False)
        module.weight.data[:] = module.weight.data.new_tensor([[2.1, 1.6]])
        spec = {
            "rounds": 24 if rate < 1 else 8,
            "algorithm": {"name": "fedavg"},
            "local": {"steps": 6, "batch": 24, "lr": 0.08},
            "participation": {"rate": rate, "sampler": "cyclic"},
        }
        keel.run(spec, model=module, data=data, hooks=[models])
        rows += [{**step, "panel": title} for step in models.steps]
    solution = np.linalg.lstsq(inputs, targets[:, 0], rcond=None)[0]
    panels = [title for title, _ in PATHS]
    points = [{"x": x, "y": y, "panel": panel, "point": "a client's optimum"} for x, y in optima for panel in panels]
    points += [{"x": solution[0], "y": solution[1], "panel": panel, "point": "the optimum of all"} for panel in panels]
    kinds = ["the server's model", "local training"]
    line = {
        "mark": {"type": "rule", "strokeWidth": 1.6},
        "encoding": {
            "x2": {"field": "x2"},
            "y2": {"field": "y2"},
            "color": {
                "field": "line",
                "type": "nominal",
                "scale": {"domain": kinds, "range": [COLOURS[1], COLOURS[0]]},
                "title": None,
            },
            "opacity": {"condition": {"test": "datum.line == 'the server\\'s model'", "value": 1}, "value": 0.55},
        },
    }
    dots = {
        "transform": [{"filter": "isValid(datum.point)"}],
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, "color": INK},
        "encoding": {
            "shape": {
                "field": "point",
                "type": "nominal",
                "scale": {"domain": ["a client's optimum", "the optimum of all"], "range": ["circle", "cross"]},
                "legend": {"title": None, "orient": "bottom"},
            }
        },
    }
    line["transform"] = [{"filter": "isValid(datum.line)"}]
    axis = {"axis": {"tickCount": 4}, "scale": {"domain": [-1.2, 2.2], "nice": False}}
    chart = {
        "data": {"values": rows + points},
        "facet": {"column": {"field": "panel", "sort": panels, "title": None}},
        "spec": {
            "width": 270,
            "height": 240,
            "layer": [line, dots],
            "encoding": {
                "x": {"field": "x", "type": "quantitative", "title": "first weight", **axis},
                "y": {"field": "y", "type": "quantitative", "title": "second weight", **axis},
            },
        },
    }
    return chart, (
        "FedAvg on a linear model with two weights and four clients, whose data have different optima. All clients: "
        "local models drift apart, and their mean approaches the optimum of all. One client per round: the server's "
        "model is the client's, and it circles."
    )


PATHS = [("all clients in each round", 1.0), ("one client per round", 0.25)]


def coverage() -> Figure:
    """The classes that the clients of the last tau rounds hold."""
    rate, rounds, clients = 0.02, 400, 100
    run = keel.run(
        {
            "rounds": rounds,
            "participation": {"rate": rate},
            "local": {"steps": 1},
            "evaluation": {"every": rounds, "last": 1},
        }
    )
    cohorts = [record["cohort"] for record in run.records]
    taus = [1, 2, 5, 10, 20, 35, 50, 75, 100]
    rows = []
    for tau in taus:
        windows = [set().union(*cohorts[end - tau : end]) for end in range(tau, rounds + 1)]
        rows.append({"tau": tau, "share": float(np.mean([len(window) for window in windows])) / clients})
    chart = {
        "data": {"values": rows},
        "width": 560,
        "height": 220,
        "layer": [
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "strokeDash": [4, 4], "color": INK, "opacity": 0.5},
                "encoding": {"x": {"datum": 1 / rate}},
            },
            {
                "data": {"values": [{}]},
                "mark": {"type": "text", "align": "left", "dx": 6, "text": "tau = 1/C"},
                "encoding": {"x": {"datum": 1 / rate}, "y": {"datum": 0.08}},
            },
            {
                "mark": {"type": "line", "point": {"size": 45, "filled": True}, "color": COLOURS[0]},
                "encoding": {
                    "x": {
                        "field": "tau",
                        "type": "quantitative",
                        "title": "rounds that the momentum averages over, tau",
                    },
                    "y": {
                        "field": "share",
                        "type": "quantitative",
                        "axis": {"format": ".0%", "tickCount": 5},
                        "scale": {"domain": [0, 1]},
                        "title": "clients that took part",
                    },
                },
            },
        ],
    }
    share = {row["tau"]: row["share"] for row in rows}
    return chart, (
        "The share of the 100 clients that took part in the last tau rounds, with C = 2 % and uniform sampling, in 400 "
        f"rounds: {share[1]:.0%} with tau = 1, {share[50]:.0%} with tau = 1/C = 50, {share[100]:.0%} with tau = 100."
    )


def deviation() -> Figure:
    """The deviation of the momentum from the update of all clients."""
    taus, rounds = [1, 5, 20], 120
    spec = {
        "rounds": rounds,
        "algorithm": {"name": "fedavg"},
        "participation": {"rate": 0.05},
        "local": {"lr": 0.01},
        "evaluation": {"every": 4, "deviation": taus, "last": 1},
    }
    records = keel.run(spec).records
    rows = [
        {"round": record["round"], "deviation": value, "momentum": f"tau = {tau}" + (" = 1/C" if tau == "20" else "")}
        for record in records
        for tau, value in record.get("deviation", {}).items()
    ]
    means = {
        tau: np.mean(
            [
                record["deviation"][str(tau)]
                for record in records
                if str(tau) in record.get("deviation", {}) and record["round"] > rounds // 2
            ]
        )
        for tau in taus
    }
    chart = {
        "data": {"values": rows},
        "width": 560,
        "height": 240,
        "mark": {"type": "line", "strokeWidth": 2.2},
        "encoding": {
            "x": {"field": "round", "type": "quantitative", "title": "round"},
            "y": {
                "field": "deviation",
                "type": "quantitative",
                "title": "relative deviation",
                "scale": {"zero": True},
                "axis": {"tickCount": 4},
            },
            "color": {
                "field": "momentum",
                "type": "nominal",
                "title": None,
                "sort": ["tau = 1", "tau = 5", "tau = 20 = 1/C"],
            },
        },
    }
    return chart, (
        "Digits, one class per client, C = 5 %, learning rate 0.01: the distance between the mean of the last tau "
        "updates and the update of all 100 clients, divided by the norm of the latter. Mean over the second half: "
        + ", ".join(f"{means[tau]:.2f} for tau = {tau}" for tau in taus)
        + "."
    )


def tau() -> Figure:
    """Accuracy over rounds for several tau."""
    rows, final = [], {}
    for value in TAUS:
        spec = {
            "rounds": 300,
            "algorithm": {"name": "ghbm", "tau": value, "beta": 0.9},
            "participation": {"rate": 0.02},
            "local": {"lr": 0.1},
            "evaluation": {"every": 10, "last": 50},
        }
        run = keel.run(spec)
        label = f"tau = {value}" + (" = 1/C" if value == 50 else "")
        final[label] = run.accuracy
        rows += [
            {"round": record["round"], "accuracy": record["accuracy"], "momentum": label}
            for record in run.records
            if "accuracy" in record and record["round"] % 10 == 0
        ]
    chart = {
        "data": {"values": rows},
        "width": 560,
        "height": 260,
        "mark": {"type": "line", "strokeWidth": 2.2},
        "encoding": {
            "x": {"field": "round", "type": "quantitative", "title": "round"},
            "y": {
                "field": "accuracy",
                "type": "quantitative",
                "title": "test accuracy",
                "axis": {"format": ".0%", "tickCount": 5},
                "scale": {"domain": [0, 1]},
            },
            "color": {"field": "momentum", "type": "nominal", "title": None, "sort": list(final)},
        },
    }
    return chart, (
        "GHBM on the digits, one class per client, C = 2 %, learning rate 0.1, one seed. Final accuracy: "
        + ", ".join(f"{accuracy:.1%} with {label}" for label, accuracy in final.items())
        + "."
    )


TAUS = [1, 10, 50, 200]
FIGURES: dict[str, Callable[[], Figure]] = {"drift": drift, "coverage": coverage, "deviation": deviation, "tau": tau}
