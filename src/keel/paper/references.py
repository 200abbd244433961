"""Tables and figures that need no runs: rates, splits, hyper-parameters, the cyclic order, the linear regression."""

from collections.abc import Callable
from math import ceil
from statistics import fmean
from typing import Any

from keel.errors import KeelError
from keel.paper import regression
from keel.paper.printed import tables
from keel.paper.recipes import Item, Scale
from keel.runs.search import grids
from keel.runs.spec import Spec, make_spec
from keel.sampling import Cyclic
from keel.task import load_data

Made = dict[str, Any]
"""A sheet's `columns` and `rows`, or a figure's `panels`, for a result."""

RATES = [
    ["FedAvg (Yang et al., 2021)", "(L Δ σ² / (N J T))^1/2 + L Δ / T", "bounded heterogeneity", "no"],
    ["FedAvg (Yang et al., 2021)", "(L Δ J σ² / (N C T))^1/2 + L Δ / T", "bounded heterogeneity", "yes"],
    [
        "FedCM (Xu et al., 2021)",
        "(L Δ (σ² + N C J ζ²) / (N C J T))^1/2 + (L Δ (σ / J^1/2 + (N C)^1/2 (ζ + G)) / ((N C)^1/2 T))^2/3",
        "bounded gradients and heterogeneity",
        "yes",
    ],
    ["FedCM (Cheng et al., 2024)", "(L Δ σ² / (N J T))^1/2 + L Δ / T", "nothing more", "no"],
    [
        "SCAFFOLD-M (Cheng et al., 2024)",
        "(L Δ σ² / (N C J T))^1/2 + L Δ / T (1 + N^2/3 / (N C))",
        "nothing more",
        "yes",
    ],
    ["GHBM (Zaccone et al., 2025)", "(L Δ σ² / (N J T))^1/2 + L Δ / T", "cyclic participation", "yes"],
]

GRIDS = {
    "cifar-lenet": ("paper-lenet", "cifar100", "lenet"),
    "cifar-resnet20": ("paper-resnet20", "cifar100", "resnet20"),
    "shakespeare": ("paper-shakespeare", "shakespeare", "char_lstm"),
    "stackoverflow": ("paper-stackoverflow", "stackoverflow", "word_lstm"),
}
"""For each column of the table of hyper-parameters its grid, data set and model."""

ROUNDS = {"paper": 300, "desktop": 300, "smoke": 20}
"""Of the linear regression."""


def rates(item: Item, scale: Scale) -> Made:
    return {"columns": ["algorithm", "rate", "needs", "partial participation"], "rows": RATES}


def data(item: Item, scale: Scale) -> Made:
    """The splits counted from the files; where they are not there, what is missing."""
    columns = ["data set", "clients", "in a round", "classes", "examples each", "local steps", "times a client"]
    rows, notes = [], ["The paper's data sets: --scale paper, which takes no runs."] if scale == "smoke" else []
    for part in item.parts(scale):
        try:
            rows.append([part.title, *counted(make_spec(part.spec))])
        except KeelError as error:
            rows.append([part.title, *["-"] * 6])
            notes.append(f"{part.title}: {error}")
        if (row := tables()["data"].get(part.printed)) is not None:
            rows.append([f"{part.title}, paper", *(_printed(value) for value in row.values())])
    return {"columns": columns, "rows": rows, "notes": notes}


def counted(spec: Spec) -> list[str]:
    """Clients, cohort, classes, examples of a client, steps of its round, and rounds that it takes part in."""
    held = load_data(spec)
    sizes = held.partition.sizes
    cohort = max(1, round(spec.participation.rate * len(sizes)))
    steps = fmean((spec.local.epochs or 1) * ceil(size / spec.local.batch) for size in sizes)
    times = spec.rounds * cohort / len(sizes)
    return [
        f"{len(sizes):,}",
        str(cohort),
        str(held.classes),
        f"{sizes.mean():,.0f}",
        f"{steps:.0f}",
        f"{times:,.0f}" if times >= 10 else f"{times:.3g}",
    ]


def hyperparameters(item: Item, scale: Scale) -> Made:
    """Each field that the paper searched: the grid, what Keel has by default, and the paper's best."""
    rows = []
    for column, (grid, data_name, model) in GRIDS.items():
        known = grids()[grid]
        best = tables()["hyperparameters"][column]
        for method, own in known["with"].items():
            spec = make_spec({"data": {"name": data_name}, "model": {"name": model}, "algorithm": {"name": method}})
            for field, values in {**known["all"], **own}.items():
                ours = _field(spec, field)
                theirs = best.get(method, {}).get(field, best["all"].get(field))
                searched = ", ".join(f"{value:g}" for value in values)
                name = f"{column} {method} {field}"  # one column, which a narrow screen repeats beside the others
                rows.append([name, searched, ours, "-" if theirs is None else f"{theirs:g}"])
    return {"columns": ["setting, method, field", "searched", "default", "paper's best"], "rows": rows}


def cyclic(item: Item, scale: Scale) -> Made:
    """Nine clients, three in a round, over three periods."""
    sampler = Cyclic(9, 3, seed=0)
    cohorts = [sampler.cohort(t).tolist() for t in range(1, 10)]
    rows = [
        {"round": t, "round_end": t + 1, "client": client, "client_end": client + 1, "times": 1}
        for t, cohort in enumerate(cohorts, start=1)
        for client in cohort
    ]
    return {
        "columns": ["round", "clients"],
        "rows": [[str(t), ", ".join(map(str, cohort))] for t, cohort in enumerate(cohorts, start=1)],
        "panels": [{"title": "who takes part", "form": "cohorts", "rows": rows}],
    }


def linear_regression(item: Item, scale: Scale) -> Made:
    panels = regression_panels(ROUNDS[scale])
    last = {panel["title"]: {row["method"]: row["mean"] for row in panel["rows"]} for panel in panels}
    rows = [[method, *(f"{losses[method]:.1e}" for losses in last.values())] for method in regression.METHODS]
    records = [
        {"method": method, **{case: losses[method] for case, losses in last.items()}} for method in regression.METHODS
    ]
    columns = [f"loss above its least, round {ROUNDS[scale]}", *last]
    return {"columns": columns, "rows": rows, "records": records, "panels": panels}


def regression_panels(rounds: int) -> list[dict[str, Any]]:
    """A panel for each case: the loss of each method over rounds."""
    return [
        {
            "title": case,
            "form": "losses",
            "labels": list(regression.METHODS),
            "rows": [
                {"method": method, "x": t, "mean": float(f"{loss:.4g}")}
                for method, losses in regression.losses(case, rounds).items()
                for t, loss in enumerate(losses, start=1)
            ],
        }
        for case in regression.CASES
    ]


MAKERS: dict[str, Callable[[Item, Scale], Made]] = {
    "rates": rates,
    "data": data,
    "hyperparameters": hyperparameters,
    "cyclic": cyclic,
    "regression": linear_regression,
}
"""By the view of the item."""


def _field(spec: Spec, name: str) -> str:
    table, field = name.split(".")
    if table == "algorithm":
        value = getattr(spec.algorithm, field)
        return "1/C" if value == "period" else f"{value:g}"
    return f"{getattr(getattr(spec, table), field):g}"


def _printed(value: Any) -> str:
    return ", ".join(f"{each:,g}" for each in (value if isinstance(value, list) else [value]))
