"""The results of all methods on the ladder of tasks, from results/paper/ladder.json."""

import json
from pathlib import Path

RESULT = Path(__file__).parents[2] / "results" / "paper" / "ladder.json"


def markdown() -> str:
    """Return a table: the final accuracy of the methods that ran on every finished task."""
    parts = [
        part for part in json.loads(RESULT.read_text())["parts"] if part["rows"] and all(map(_ended, part["rows"]))
    ]
    parts.sort(key=_order)
    results = [{row["label"]: row for row in part["rows"]} for part in parts]
    shared = [label for label in results[0] if all(label in rows for rows in results)]
    lines = ["| method | " + " | ".join(part["title"] for part in parts) + " |", "|---|" + "--:|" * len(parts)]
    best = [max(row["accuracy_mean"] for row in rows.values()) for rows in results]
    for label in shared:
        cells = [_cell(rows[label], top) for rows, top in zip(results, best, strict=True)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _order(part: dict) -> tuple[str, bool, float]:
    """Return the data set, whether the data are IID, and the participation rate."""
    return part["spec"]["data.name"], part["spec"]["data.partition"] == "iid", part["spec"]["participation.rate"]


def _ended(row: dict) -> bool:
    return row.get("accuracy_mean") is not None


def _cell(row: dict, best: float) -> str:
    text = f"{100 * row['accuracy_mean']:.1f} ± {100 * row['accuracy_std']:.1f} %"
    return f"**{text}**" if row["accuracy_mean"] == best else text
