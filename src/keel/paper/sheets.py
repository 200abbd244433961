"""The tables of a result: methods by settings, with the paper's numbers next to the measured ones."""

from collections.abc import Callable

from keel.paper.cost import TargetCost, target_costs
from keel.paper.ladder import level_with_best, rank_ladder
from keel.paper.ladder_cost import relative_costs
from keel.paper.recipes import printed_title
from keel.paper.results import OLDER_MARK, Result, Row, cited
from keel.report.significance import Difference
from keel.report.tables import Places, Sheet, change, final_text
from keel.units import duration, size

PRINTED_COSTS = ("paper: bytes", "paper: time")
MINIMUM_SECONDS = 60
"""Wall-clock times of shorter runs are not shown: they depend on the load of the machine more than on the method."""


def accuracy_sheets(result: Result) -> list[Sheet]:
    """Return methods by parts; with a single method, one row per part."""
    parts = result["parts"]
    labels = list(dict.fromkeys(row["label"] for part in parts for row in part["rows"]))
    if len(labels) == 1:
        first = [(part["title"], part["rows"][0]) for part in parts]
        rows = [[marked({**row, "label": title}), _measured(row), _printed(row)] for title, row in first]
        return [Sheet("", [labels[0], "Keel", "paper"], rows, {})]
    columns = ["method"]
    places: Places = {}
    cells: dict[str, list[str]] = {label: [label] for label in labels}
    for part in parts:
        by_label = {row["label"]: row for row in part["rows"]}
        has_printed = any(row["printed"] for row in part["rows"])
        columns += [part["title"], *([_paper_heading(part)] if has_printed else [])]
        ranks = _ranks(part["rows"])
        for number, label in enumerate(labels):
            row = by_label.get(label)
            if label in ranks:
                places[number, len(cells[label])] = ranks[label]
            mark = " †" if row is not None and row.get("guessed") else ""
            cells[label] += [_measured(row) + mark, *([_printed(row)] if has_printed else [])]
    return [Sheet("", columns, list(cells.values()), places)]


def cost_sheets(result: Result) -> list[Sheet]:
    """Return for each part the bytes and the wall-clock time until FedAvg's final accuracy."""
    return [_cost_sheet(part) for part in result["parts"]]


def _cost_sheet(part: Row) -> Sheet:
    has_printed, timed = any(row["printed_cost"] for row in part["rows"]), is_timed(part)
    columns = ["method", "relative cost", "share of rounds", "bytes", "Δ bytes"]
    columns += [*(["paper: bytes"] if has_printed else []), *(["time", "Δ time"] if timed else [])]
    columns += ["paper: time"] if has_printed else []
    costs = target_costs(part)
    rows = []
    for row, cost in zip(part["rows"], costs, strict=True):
        cells = {
            "method": marked({**row, "label": cited(row)}),
            **dict(zip(PRINTED_COSTS, row["printed_cost"] or ("-", "-"), strict=True)),
        }
        rows.append([(cells | _cost_cells(cost)).get(column, "-") for column in columns])
    heading = _paper_heading(part) if has_printed else "paper"
    title = part["title"] + ("" if heading == "paper" else f" ({heading})")
    return Sheet(title, columns, rows, _cheapest(costs, columns))


def _cost_cells(cost: TargetCost | None) -> dict[str, str]:
    if cost is None:
        return {}
    cells = {
        "relative cost": f"{cost.relative_round:.2g}x",
        "share of rounds": f"{cost.share:.2f}" if cost.reached else "never",
        "bytes": size(cost.bytes),
        "Δ bytes": change(cost.bytes_saved),
    }
    if cost.seconds is not None:
        cells |= {"time": duration(cost.seconds), "Δ time": change(cost.seconds_saved)}
    return cells


def is_timed(part: Row) -> bool:
    """Return whether the wall-clock times of a part are kept and long enough to be shown."""
    costs = [row["cost"] for row in part["rows"] if row.get("cost")]
    return all(cost["seconds"] is not None and cost["seconds"] / cost["share"] >= MINIMUM_SECONDS for cost in costs)


def against_sheets(result: Result) -> list[Sheet]:
    """Return methods by the values on the x-axis if every method has them; otherwise methods by parts."""
    if not any(row["values"] for part in result["parts"] for row in part["rows"]):
        return accuracy_sheets(result)
    sheets = []
    for part in result["parts"]:
        values = list(dict.fromkeys(axis_value(result, row) or "" for row in part["rows"]))
        by_cell = {(row["label"], axis_value(result, row)): row for row in part["rows"]}
        names = {row["label"]: marked(row) for row in part["rows"]}
        rows = [[name, *(_measured(by_cell.get((label, value))) for value in values)] for label, name in names.items()]
        places: Places = {}
        for column, value in enumerate(values, start=1):
            ranks = _ranks([row for row in part["rows"] if axis_value(result, row) == value])
            places |= {(list(names).index(label), column): place for label, place in ranks.items()}
        sheets.append(Sheet(part["title"], [result["against"].rpartition(".")[2], *values], rows, places))
    return sheets


def deviation_sheets(result: Result) -> list[Sheet]:
    """Return the deviation of the pseudo-gradients by tau."""
    deviations = [part["rows"][0].get("deviation", {}) for part in result["parts"]]
    taus = list(dict.fromkeys(tau for deviation in deviations for tau in deviation))
    means = {tau: [deviation.get(tau, {}).get("second_half") for deviation in deviations] for tau in taus}
    rows = [[tau, *("-" if mean is None else f"{mean:.2f}" for mean in means[tau])] for tau in taus]
    columns = ["tau", *(cited({**part["rows"][0], "label": part["title"]}) for part in result["parts"])]
    return [Sheet("Mean over the second half of the rounds", columns, rows, {})]


def ladder_sheets(result: Result) -> list[Sheet]:
    """Return methods by tasks with the mean rank; bold is the best of a task, underlined what is level with it."""
    parts, ranking = result["parts"], rank_ladder(result)
    labels = list(dict.fromkeys(row["label"] for part in parts for row in part["rows"]))
    cells: dict[str, list[str]] = {label: [label] for label in labels}
    places: Places = {}
    for column, part in enumerate(parts, start=1):
        by_label = {row["label"]: row for row in part["rows"]}
        for label in labels:
            cells[label].append(_measured(by_label.get(label)))
        places |= {(labels.index(each), column): 1 if best else 2 for each, best in level_with_best(part).items()}
    columns = ["method", *(part["title"] for part in parts)]
    if ranking is not None:
        columns.append(f"mean rank ({ranking.tasks} tasks)")
        for label in labels:
            cells[label].append(f"{ranking.ranks[label]:.1f}" if label in ranking.ranks else "-")
    return [Sheet("", columns, list(cells.values()), places), *_ladder_costs(result)]


def _ladder_costs(result: Result) -> list[Sheet]:
    """Return what each method spends until FedAvg's final accuracy, over the non-IID tasks."""
    tasks, costs = relative_costs(result)
    if not costs:
        return []
    columns = ["method", "rounds", "bytes", "modelled transfer time", "runs that reached it"]
    rows = [
        [each.label, *map(_ratio, (each.rounds, each.bytes, each.seconds)), f"{each.reached} of {each.runs}"]
        for each in costs
    ]
    places: Places = {}
    for column, name in enumerate(("rounds", "bytes", "seconds"), start=1):
        means = [getattr(each, name).mean for each in costs]
        places |= {(n, column): 1 + sum(other < mean for other in means) for n, mean in enumerate(means)}
    return [Sheet(f"Cost until FedAvg's final accuracy, {len(tasks)} non-IID tasks", columns, rows, places)]


def _ratio(difference: Difference) -> str:
    return f"× {difference.mean:.2f} ({difference.low:.2f} to {difference.high:.2f})"


SHEETS: dict[str, Callable[[Result], list[Sheet]]] = {
    "accuracy": accuracy_sheets,
    "cost": cost_sheets,
    "curves": accuracy_sheets,
    "against": against_sheets,
    "deviation": deviation_sheets,
    "ladder": ladder_sheets,
    "heat map": accuracy_sheets,
}
"""By the `view` of the recipe."""


def axis_value(result: Result, row: Row) -> str | None:
    """Return the row's value on the x-axis, or None if its method does not have the field."""
    name = result["against"]
    if name in row["values"]:
        return f"{row['values'][name]:g}"
    overrides = dict(field.split("=") for field in row["method"].split()[1:])
    return overrides.get(name)


def marked(row: Row) -> str:
    """Return the row's label, with a dagger if the paper does not give its hyper-parameters."""
    return f"{row['label']} †" if row.get("guessed") else row["label"]


def _measured(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["runs"]:
        return "not run"
    incomplete = f" ({row['runs']} of {row['wanted']} seeds)" if row["runs"] < row["wanted"] else ""
    return final_text(row) + incomplete + (f" {OLDER_MARK}" if row.get("older") else "")


def _printed(row: Row | None) -> str:
    printed = None if row is None else row["printed"]
    if printed is None:
        return "-"
    return printed if printed == "diverged" else f"{printed} %"


def _paper_heading(part: Row) -> str:
    """Return the heading of the paper's numbers, with their setting if it differs from the part's."""
    title = printed_title(part["printed"])
    return "paper" if title == part["title"] else f"paper: {title}"


def _ranks(rows: list[Row]) -> dict[str, int]:
    """Return the ranks by accuracy, if at least two rows have one."""
    means = {row["label"]: row["accuracy_mean"] for row in rows if row.get("accuracy_mean") is not None}
    if len(means) < 2:
        return {}
    return {label: 1 + sum(other > mean for other in means.values()) for label, mean in means.items()}


def _cheapest(costs: list[TargetCost | None], columns: list[str]) -> Places:
    """Return the ranks by bytes and, if the sheet has the column, by wall-clock time."""
    places: Places = {}
    for heading, name in (("bytes", "bytes"), ("time", "seconds")):
        if heading in columns:
            spent = {number: getattr(cost, name) for number, cost in enumerate(costs) if cost is not None}
            column = columns.index(heading)
            places |= {(n, column): 1 + sum(other < value for other in spent.values()) for n, value in spent.items()}
    return places
