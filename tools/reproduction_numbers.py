"""The numbers that the texts of docs/reproduction.md refer to, from results/."""

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from keel.paper.results import Result, Row
from keel.report.tables import final_text

RESULTS = Path(__file__).parents[1] / "results"


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
    for row in json.loads((RESULTS / "digits_scarce.json").read_text(encoding="utf-8")):
        texts[f"scarce.{row['algorithm']}"] = final_text(row)
    study = json.loads((RESULTS / "scaffold.json").read_text(encoding="utf-8"))
    texts |= {f"scaffold.{title}": _over_seeds(by_seed, 100) for title, by_seed in study["accuracy"].items()}
    texts |= {f"scaffold.ratio.{title}": _over_seeds(by_seed, 1) for title, by_seed in study["gradient_ratio"].items()}
    return texts


def _over_seeds(by_seed: dict[str, float | None], scale: int) -> str:
    """Return the mean over the seeds and their range; a diverged run counts as one that is right at random."""
    values = [scale * (0.1 if value is None else value) for value in by_seed.values()]
    spread = f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else "one seed"
    return f"{fmean(values):.1f} ({spread})"


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
