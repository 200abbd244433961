"""Tables and figures that are computed directly, without run folders."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

from keel.config.defaults import make_spec
from keel.config.schema import Spec
from keel.core.sampling import Cyclic
from keel.errors import KeelError
from keel.paper import regression
from keel.paper.printed import printed_tables
from keel.paper.recipes import Recipe, Scale
from keel.runs.build import load_data, local_config
from keel.runs.search_space import grids

Content = dict[str, Any]
"""The `columns` and `rows` of a table, and the `panels` of a figure, as result.json stores them."""

RATES = [
    ["FedAvg (Yang et al., 2021)", "(L Δ σ² / (N J T))^1/2 + L Δ / T", "bounded heterogeneity", "no"],
    ["FedAvg (Yang et al., 2021)", "(L Δ J σ² / (N C T))^1/2 + L Δ / T", "bounded heterogeneity", "yes"],
    [
        "FedCM (Xu et al., 2021)",
        "(L Δ (σ² + N C J ζ²) / (N C J T))^1/2 + (L Δ (σ / J^1/2 + (N C)^1/2 (ζ + G)) / ((N C)^1/2 T))^2/3",
        "bounded gradients and heterogeneity",
        "yes",
    ],
    ["FedCM (Cheng et al., 2024)", "(L Δ σ² / (N J T))^1/2 + L Δ / T", "none", "no"],
    ["SCAFFOLD-M (Cheng et al., 2024)", "(L Δ σ² / (N C J T))^1/2 + L Δ / T (1 + N^2/3 / (N C))", "none", "yes"],
    ["GHBM (Zaccone et al., 2025)", "(L Δ σ² / (N J T))^1/2 + L Δ / T", "cyclic participation", "yes"],
]
"""Algorithm, convergence rate, additional assumption, and whether the rate covers partial participation."""

GRIDS = {
    "cifar-lenet": ("paper-lenet", "cifar100", "lenet"),
    "cifar-resnet20": ("paper-resnet20", "cifar100", "resnet20"),
    "shakespeare": ("paper-shakespeare", "shakespeare", "char_lstm"),
    "stackoverflow": ("paper-stackoverflow", "stackoverflow", "word_lstm"),
}
"""Grid, data set and model of each column of the paper's table of hyper-parameters."""

REGRESSION_ROUNDS = {"paper": 300, "desktop": 300, "smoke": 20}


def convergence_rates(recipe: Recipe, scale: Scale) -> Content:
    """Return the paper's table of convergence rates."""
    return {"columns": ["algorithm", "rate", "additional assumption", "partial participation"], "rows": RATES}


def data_sets(recipe: Recipe, scale: Scale) -> Content:
    """Return the statistics of the data sets; a data set that is not installed gets a note instead."""
    columns = ["data set", "clients", "cohort", "classes", "examples per client", "local steps"]
    columns += ["rounds per client"]
    rows, notes = [], ["--scale paper shows the paper's data sets; it needs no runs."] if scale == "smoke" else []
    for part in recipe.parts(scale):
        try:
            rows.append([part.title, *data_statistics(make_spec(part.spec))])
        except KeelError as error:
            rows.append([part.title, *["-"] * 6])
            notes.append(f"{part.title}: {error}")
        if (printed := printed_tables()["data"].get(part.printed)) is not None:
            rows.append([f"{part.title}, paper", *(_format_printed(value) for value in printed.values())])
    return {"columns": columns, "rows": rows, "notes": notes}


def data_statistics(spec: Spec) -> list[str]:
    """Return clients, cohort size, classes, and per client: examples, local steps, expected rounds of participation."""
    data = load_data(spec)
    sizes = data.partition.sizes
    cohort = spec.participation.cohort_size(len(sizes))
    config = local_config(spec.local)
    steps = fmean(config.count(size) for size in sizes)
    participations = spec.rounds * cohort / len(sizes)
    return [
        f"{len(sizes):,}",
        str(cohort),
        str(data.classes),
        f"{sizes.mean():,.0f}",
        f"{steps:.0f}",
        f"{participations:,.0f}" if participations >= 10 else f"{participations:.3g}",
    ]


def hyperparameters(recipe: Recipe, scale: Scale) -> Content:
    """Return the fields that the paper searched: the grid, Keel's default, and the paper's best value."""
    rows = []
    for column, (grid_name, data_name, model) in GRIDS.items():
        grid = grids()[grid_name]
        best = printed_tables()["hyperparameters"][column]
        for method, axes in grid["with"].items():
            spec = make_spec({"data": {"name": data_name}, "model": {"name": model}, "algorithm": {"name": method}})
            for field, values in {**grid["all"], **axes}.items():
                printed = best.get(method, {}).get(field, best["all"].get(field))
                searched = ", ".join(f"{value:g}" for value in values)
                name = f"{column} {method} {field}"  # one column: a narrow terminal repeats it in every piece
                rows.append([name, searched, _default(spec, field), "-" if printed is None else f"{printed:g}"])
    return {"columns": ["setting, method, field", "searched", "default", "paper's best"], "rows": rows}


def cyclic_participation(recipe: Recipe, scale: Scale) -> Content:
    """Return the cohorts of nine clients under cyclic participation, three per round, over three periods."""
    sampler = Cyclic(9, 3, seed=0)
    cohorts = {t: sampler.cohort(t).tolist() for t in range(1, 10)}
    rows = [
        {"round": t, "round_end": t + 1, "client": client, "client_end": client + 1, "times": 1}
        for t, cohort in cohorts.items()
        for client in cohort
    ]
    return {
        "columns": ["round", "clients"],
        "rows": [[str(t), ", ".join(map(str, cohort))] for t, cohort in cohorts.items()],
        "panels": [{"title": "participating clients", "form": "cohorts", "rows": rows}],
    }


def linear_regression(recipe: Recipe, scale: Scale) -> Content:
    """Return the final losses and the loss curves of the linear regression."""
    panels = regression_panels(REGRESSION_ROUNDS[scale])
    final = {panel["title"]: {row["method"]: row["mean"] for row in panel["rows"]} for panel in panels}
    records = [
        {"method": method, **{case: losses[method] for case, losses in final.items()}} for method in regression.METHODS
    ]
    return {
        "columns": [f"excess loss, round {REGRESSION_ROUNDS[scale]}", *final],
        "rows": [[method, *(f"{losses[method]:.1e}" for losses in final.values())] for method in regression.METHODS],
        "records": records,
        "panels": panels,
    }


def regression_panels(rounds: int) -> list[dict[str, Any]]:
    """Return a panel for each case of the linear regression: the loss of each method over rounds."""
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


COMPUTED: dict[str, Callable[[Recipe, Scale], Content]] = {
    "rates": convergence_rates,
    "data": data_sets,
    "hyperparameters": hyperparameters,
    "cyclic": cyclic_participation,
    "regression": linear_regression,
}
"""By the `view` of the recipe."""


def _default(spec: Spec, name: str) -> str:
    table, field = name.split(".")
    value = getattr(getattr(spec, table), field)
    return "1/C" if value == "period" else f"{value:g}"


def _format_printed(value: Any) -> str:
    return ", ".join(f"{number:,g}" for number in (value if isinstance(value, list) else [value]))
