"""The numbers that the texts of docs/reproduction.md refer to, from results/."""

import json
import re
from itertools import pairwise
from pathlib import Path

from keel.paper.results import Result, Row
from keel.report.tables import final_text

SCARCE = Path(__file__).parents[1] / "results/digits_scarce.json"


def numbers(results: dict[str, Result]) -> dict[str, str]:
    """Return the numbers that texts may refer to: {digits.0.fedhbm} is FedHBM's accuracy in part 0 of digits."""
    texts = {}
    for name, result in results.items():
        for number, part in enumerate(result.get("parts", [])):
            for row in part["rows"]:
                texts |= {f"{name}.{number}.{key}": text for key, text in _row_numbers(row).items()}
    for lr, method, *fields in results.get("regression", {}).get("rows", []):
        names = ("median", "range", "near", "far")
        texts |= {f"regression.{lr}.{method} {name}": text for name, text in zip(names, fields, strict=True)}
    for G, method, *values, ratio in results.get("theorem", {}).get("rows", []):
        texts |= {f"theorem.{G}.{method}": values[-1], f"theorem.{G}.{method} ratio": ratio}
    for row in json.loads(SCARCE.read_text(encoding="utf-8")):
        texts[f"scarce.{row['algorithm']}"] = final_text(row)
    return texts


def _row_numbers(row: Row) -> dict[str, str]:
    name = " ".join([row["method"], *map(str, row["values"].values())])
    texts = {name: final_text(row) if row["runs"] else "not run"}
    if "curve" in row:
        most = max(abs(after - before) for before, after in pairwise(row["curve"]["mean"]))
        texts[f"{row['method']} swing"] = f"{100 * most:.1f}"
    for tau, series in row.get("deviation", {}).items():
        texts[f"tau={tau}"] = f"{series['second_half']:.2f}"
    return texts


def fill(text: str, values: dict[str, str]) -> str:
    """Return the text with numbers in place of the names in braces."""
    return re.sub(r"\{([^}]+)\}", lambda name: values[name[1]], text.strip())
