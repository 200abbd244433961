"""Tables and figures that are computed directly, without run folders."""

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from torch import Tensor

from keel.config.defaults import make_spec
from keel.config.schema import Spec
from keel.core.sampling import Cyclic
from keel.errors import KeelError
from keel.paper import regression, theorem
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

REGRESSION = {"paper": (300, regression.ORDERS), "desktop": (300, regression.ORDERS), "smoke": (20, 2)}
"""Rounds, and orders of the clients."""
THEOREM = {"desktop": ([250, 500, 1000, 2000, 4000], theorem.ORDERS), "smoke": ([5, 10], 1)}
"""Values of T, and orders of the clients."""


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
    rounds, orders = REGRESSION[scale]
    curves = regression_curves(rounds, orders)
    records = regression_records(curves)
    columns = [
        "local learning rate",
        "method",
        "median loss",
        "range",
        "orders near FedCM, C = 1",
        "orders far above it",
    ]
    notes = [
        f"Loss after {rounds} rounds, over {orders} orders of the clients. Near: at most {regression.NEAR:g} times the "
        f"loss of {regression.BASELINE}; far: more than {regression.FAR:g} times. Bands in the figure: all orders. "
        "Curves that diverge in every order are not drawn."
    ]
    return {
        "columns": columns,
        "rows": [[_format_field(record, name) for name in RECORD_FIELDS] for record in records],
        "records": records,
        "panels": regression_panels(curves),
        "notes": notes,
    }


Curves = dict[float, dict[str, Tensor]]
"""By local learning rate and method: a row per order of the clients, a column per round from 0."""


def regression_curves(rounds: int, orders: int) -> Curves:
    """Return the losses of the linear regression."""
    return {
        lr: {method: regression.loss_curves(method, lr, rounds, orders) for method in regression.METHODS}
        for lr in regression.LEARNING_RATES
    }


def regression_records(curves: Curves) -> list[dict[str, Any]]:
    """Return the final losses over the orders, and in how many orders they are near and far from the baseline's."""
    records = []
    for lr, methods in curves.items():
        baseline = float(methods[regression.BASELINE][0, -1])
        for method, losses in methods.items():
            final = losses[:, -1]
            counts = {
                "orders": len(final),
                "near": int((final <= regression.NEAR * baseline).sum()),
                "far": int((final > regression.FAR * baseline).sum()),
            }
            spread = {"median": float(final.quantile(0.5)), "low": float(final.min()), "high": float(final.max())}
            records.append({"lr": lr, "method": method, **spread, **counts})
    return records


RECORD_FIELDS = ("lr", "method", "median", "range", "near", "far")


def _format_field(record: dict[str, Any], name: str) -> str:
    match name:
        case "lr":
            return f"{record['lr']:g}"
        case "method":
            return str(record["method"])
        case "median":
            return f"{record['median']:.3g}"
        case "range":
            return "-" if record["orders"] == 1 else f"{record['low']:.3g} to {record['high']:.3g}"
        case _:
            return "-" if record["orders"] == 1 else f"{record[name]} of {record['orders']}"


def regression_panels(curves: Curves) -> list[dict[str, Any]]:
    """Return a panel for each local learning rate: the median loss of each method over rounds, and the range."""
    panels = []
    for lr, methods in curves.items():
        drawn = {method: losses for method, losses in methods.items() if losses[:, -1].min() < losses[0, 0]}
        rows = [row for method, losses in drawn.items() for row in _spread(method, range(losses.shape[1]), losses)]
        title = f"local learning rate {lr:g}"
        panels.append({"title": title, "form": "losses", "labels": list(regression.METHODS), "rows": rows})
    return panels


def rate_independent_of_dissimilarity(recipe: Recipe, scale: Scale) -> Content:
    """Return (1/T) sum |grad f|^2 of each method for growing T and G."""
    horizons, orders = THEOREM[scale]
    results = {method: theorem.best_mean_squares(method, horizons, orders) for method in theorem.METHODS}
    records: list[dict[str, Any]] = [
        {"method": method, "G": G, "T": T, "median": float(values[:, row, column].quantile(0.5))}
        | {"low": float(values[:, row, column].min()), "high": float(values[:, row, column].max())}
        for method, values in results.items()
        for column, G in enumerate(theorem.DISSIMILARITIES)
        for row, T in enumerate(horizons)
    ]
    medians = {(record["method"], record["G"], record["T"]): record["median"] for record in records}
    first, last = horizons[0], horizons[-1]
    rows = [
        [
            f"{G:,}",
            method,
            *(f"{medians[method, G, T]:.3g}" for T in horizons),
            f"{medians[method, G, first] / medians[method, G, last]:.1f}",
        ]
        for G in theorem.DISSIMILARITIES
        for method in theorem.METHODS
    ]
    largest = theorem.DISSIMILARITIES[-1]
    by_rounds = [row for m, values in results.items() for row in _spread(m, horizons, values[:, :, -1])]
    by_dissimilarity = [
        row for m, values in results.items() for row in _spread(m, theorem.DISSIMILARITIES, values[:, -1, :])
    ]
    labels = list(theorem.METHODS)
    return {
        "columns": ["G", "method", *(f"T = {T:,}" for T in horizons), "first / last"],
        "rows": rows,
        "records": records,
        "panels": [
            {"title": f"G = {largest:,}", "form": "horizons", "labels": labels, "rows": by_rounds},
            {"title": f"T = {last:,}", "form": "dissimilarities", "labels": labels, "rows": by_dissimilarity},
        ],
        "notes": [
            f"(1/T) sum |grad f|^2, median over {orders} orders of the clients; bands: all orders. Each method at the "
            f"best of {len(theorem.FRACTIONS)} server steps for each T and G, the same steps for all methods."
        ],
    }


def _spread(method: str, x: Iterable[int], values: Tensor) -> list[dict[str, Any]]:
    """Return the points of a curve: the median over the rows of `values`, the least and the largest value."""
    columns = zip(x, values.quantile(0.5, dim=0), values.min(dim=0)[0], values.max(dim=0)[0], strict=True)
    return [
        {
            "method": method,
            "x": at,
            **{k: float(f"{v:.4g}") for k, v in zip(("mean", "low", "high"), point, strict=True)},
        }
        for at, *point in columns
    ]


COMPUTED: dict[str, Callable[[Recipe, Scale], Content]] = {
    "rates": convergence_rates,
    "data": data_sets,
    "hyperparameters": hyperparameters,
    "cyclic": cyclic_participation,
    "regression": linear_regression,
    "theorem": rate_independent_of_dissimilarity,
}
"""By the `view` of the recipe."""


def _default(spec: Spec, name: str) -> str:
    table, field = name.split(".")
    value = getattr(getattr(spec, table), field)
    return "1/C" if value == "period" else f"{value:g}"


def _format_printed(value: Any) -> str:
    return ", ".join(f"{number:,g}" for number in (value if isinstance(value, list) else [value]))
