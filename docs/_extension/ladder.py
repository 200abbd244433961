"""The results of all methods on the ladder of tasks, from results/paper/ladder.json."""

import json
from itertools import groupby
from pathlib import Path

RESULT = Path(__file__).parents[2] / "results" / "paper" / "ladder.json"
SIMILAR = "Clients that differ less"


def markdown() -> str:
    """Return a table per group of tasks: the final accuracy of the methods that ran on every finished task."""
    parts = [
        part for part in json.loads(RESULT.read_text())["parts"] if part["rows"] and all(map(_ended, part["rows"]))
    ]
    results = {part["title"]: {row["label"]: row for row in part["rows"]} for part in parts}
    shared = [label for label in next(iter(results.values())) if all(label in rows for rows in results.values())]
    blocks = []
    for group, members in groupby(sorted(parts, key=_order), _group):
        titles = [part["title"] for part in members]
        heads = [title.removeprefix(f"{group.partition(',')[0]}, ") for title in titles]
        lines = ["| method | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
        for label in shared:
            lines.append(f"| {label} | " + " | ".join(_cell(results[title], label) for title in titles) + " |")
        blocks.append(f"{group[0].upper()}{group[1:]}:\n\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def _group(part: dict) -> str:
    """Return the data set if each client has one class."""
    alone = part["spec"]["data.partition"] == "dirichlet"
    return f"{part['title'].partition(',')[0]}, one class per client" if alone else SIMILAR


def _order(part: dict) -> tuple[bool, str, int, float, str]:
    """Return the group and, in it, the number of clients and the participation rate."""
    spec, group = part["spec"], _group(part)
    clients = 0 if group == SIMILAR else spec["data.clients"]
    return group == SIMILAR, group.lower(), clients, spec["participation.rate"], part["title"]


def _ended(row: dict) -> bool:
    return row.get("accuracy_mean") is not None


def _cell(rows: dict[str, dict], label: str) -> str:
    text = f"{100 * rows[label]['accuracy_mean']:.1f} ± {100 * rows[label]['accuracy_std']:.1f}"
    best = max(row["accuracy_mean"] for row in rows.values())
    return f"**{text}**" if rows[label]["accuracy_mean"] == best else text
