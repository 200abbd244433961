"""The paper's three claims in numbers from results/, and the numbers that the texts of the page refer to."""

import json
import re
from itertools import pairwise
from pathlib import Path

from keel.paper.cost import TargetCost, target_costs
from keel.paper.results import Result, Row
from keel.report.tables import change, final_text
from keel.units import size

SCARCE = Path(__file__).parents[1] / "results/digits_scarce.json"
FAMILY = ("ghbm", "localghbm", "fedhbm")
MOMENTUM = ("fedavgm", "fedacg", "scaffold_m", "fedcm", "fedadc", "mimemom", "mimelitemom")
"""The other methods that the paper lists as momentum-based."""


def lead(results: dict[str, Result]) -> list[str]:
    """Compare the best of the GHBM family with the best other momentum method, at alpha = 0 and on MNIST by writer."""
    one_class = _one_class_settings(results, "controlled-cifar10", "digits", "tau", "controlled")
    writers = [(f"{part['title']}, not alpha = 0 (`mnist`)", part["rows"]) for part in _parts(results, "mnist")[:1]]
    lines = []
    for title, rows in [*one_class, *writers]:
        family, other = _best(rows, FAMILY), _best(rows, MOMENTUM)
        if family is not None and other is not None:
            count = sum(row.get("algorithm") in MOMENTUM and row.get("accuracy_mean") is not None for row in rows)
            best = f"the best of {count} other momentum methods" if count > 1 else "the only other momentum method"
            difference = _format_lead(family, other)
            lines.append(f"{title}: {_with_accuracy(family)}; {best}, {_with_accuracy(other)}; {difference}.")
    return lines


def _format_lead(family: Row, other: Row) -> str:
    difference = family["accuracy_mean"] - other["accuracy_mean"]
    spread = max(row["accuracy_std"] or 0.0 for row in (family, other))
    text = f"difference {100 * difference:+.1f} points"
    if spread == 0:
        return f"{text} (one seed, no standard deviation)"
    return f"{text} (within the standard deviation)" if abs(difference) <= spread else text


def best_tau(results: dict[str, Result]) -> list[str]:
    """Report GHBM's accuracy for each tau, and the best one."""
    lines = []
    for part in _parts(results, "tau"):
        rows = {tau: row for row in part["rows"] if (tau := _tau(row)) and row.get("accuracy_mean") is not None}
        if rows:
            best = max(rows, key=lambda tau: rows[tau]["accuracy_mean"])
            least = rows[best]["accuracy_mean"] - (rows[best]["accuracy_std"] or 0.0)
            near = [tau for tau, row in rows.items() if tau != best and row["accuracy_mean"] >= least]
            within = f"; within its standard deviation: {', '.join(near)}" if near else ""
            values = ", ".join(f"{tau}: {final_text(row)}" for tau, row in rows.items())
            unsearched = [tau for tau, row in rows.items() if part["grid"] and "chosen" not in row]
            rates = f"; without a searched learning rate: {', '.join(unsearched)}" if unsearched else ""
            period = 1 / part["spec"]["participation.rate"]
            lines.append(f"{part['title']}, 1/C = {period:g}: tau = {best} is best{within} ({values}){rates}.")
    return lines


def cheapest(results: dict[str, Result]) -> list[str]:
    """Report the method that reaches FedAvg's final accuracy with the fewest bytes, and FedHBM."""
    lines = []
    for part in _parts(results, "cost"):
        pairs = zip(part["rows"], target_costs(part), strict=True)
        rows = [(row, cost) for row, cost in pairs if cost is not None and row["algorithm"] != "fedavg"]
        if rows:
            least = min(cost.bytes for _, cost in rows)
            first = [(row, cost) for row, cost in rows if cost.bytes == least]
            names = " and ".join(_format_cost(row, cost) for row, cost in first)
            text = f"the cheapest of {1 + len(rows)} methods: {names}"
            for row, cost in rows:
                if row["algorithm"] == "fedhbm" and cost.bytes > least:
                    cheaper = sum(other.bytes < cost.bytes for _, other in rows)
                    text += f"; {cheaper} methods are cheaper than {_format_cost(row, cost)}"
            lines.append(f"{part['title']}: {text}.")
    return lines


def _format_cost(row: Row, cost: TargetCost) -> str:
    seeds = [rounds for rounds in row["rounds_to_target_seeds"] if rounds is not None]
    span = f", single seeds {min(seeds)} to {max(seeds)}" if len(seeds) > 1 else ""
    reached = f"{row['rounds_to_target']} rounds{span}" if cost.reached else "never reached"
    return f"{row['label']} with {size(cost.bytes)} ({change(cost.bytes_saved)} compared with FedAvg, {reached})"


def numbers(results: dict[str, Result]) -> dict[str, str]:
    """Return the numbers that texts may refer to: {digits.0.fedhbm} is FedHBM's accuracy in part 0 of digits."""
    texts = {}
    for name, result in results.items():
        for number, part in enumerate(result.get("parts", [])):
            for row in part["rows"]:
                texts |= {f"{name}.{number}.{key}": text for key, text in _row_numbers(row).items()}
    for method, *losses in results.get("regression", {}).get("rows", []):
        texts |= {f"regression.{number}.{method}": loss for number, loss in enumerate(losses)}
    for row in json.loads(SCARCE.read_text(encoding="utf-8")):
        texts[f"scarce.{row['algorithm']}"] = final_text(row)
    return texts


def _row_numbers(row: Row) -> dict[str, str]:
    texts = {}
    if row.get("accuracy_mean") is not None:
        texts[" ".join([row["method"], *map(str, row["values"].values())])] = final_text(row)
    if "curve" in row:
        most = max(abs(after - before) for before, after in pairwise(row["curve"]["mean"]))
        texts[f"{row['method']} swing"] = f"{100 * most:.1f}"
    for tau, series in row.get("deviation", {}).items():
        texts[f"tau={tau}"] = f"{series['second_half']:.2f}"
    return texts


def fill(text: str, values: dict[str, str]) -> str:
    """Return the text with numbers in place of the names in braces."""
    return re.sub(r"\{([^}]+)\}", lambda name: values[name[1]], text.strip())


def _one_class_settings(results: dict[str, Result], *names: str) -> list[tuple[str, list[Row]]]:
    """Return the title and rows of the parts with alpha = 0; of parts with the same data set and model the first.

    Of several values of tau only 1/C counts, which the paper proposes: choosing the best would use the test set.
    """
    settings: dict[tuple[str, str], tuple[str, list[Row]]] = {}
    for name in names:
        for part in _parts(results, name):
            spec = part["spec"]
            period = f"{1 / spec.get('participation.rate', 1):g}"
            rows = [row for row in part["rows"] if row["values"].get("data.alpha", spec.get("data.alpha")) == 0]
            rows = [row for row in rows if _tau(row) in (None, period)]
            if rows:
                rates = ", at the paper's learning rates" if part.get("printed") else ""
                task = spec.get("data.name", ""), spec.get("model.name", "")
                settings.setdefault(task, (f"{part['title']}{rates} (`{name}`)", rows))
    return list(settings.values())


def _tau(row: Row) -> str | None:
    """Return the tau that a method's overrides set."""
    overrides = dict(field.split("=") for field in row["method"].split()[1:])
    return overrides.get("algorithm.tau")


def _with_accuracy(row: Row) -> str:
    return f"{row['label']} {final_text(row)}"


def _parts(results: dict[str, Result], name: str) -> list[Row]:
    return results.get(name, {}).get("parts", [])


def _best(rows: list[Row], algorithms: tuple[str, ...]) -> Row | None:
    finished = [row for row in rows if row.get("algorithm") in algorithms and row.get("accuracy_mean") is not None]
    return max(finished, key=lambda row: row["accuracy_mean"], default=None)
