"""Run every method of a grid at its best point, over five seeds, and write the results.

    python tools/experiment_digits.py results/NAME_grid.toml   run; write results/NAME.json
    python tools/experiment_digits.py pages                    rewrite the tables in docs/ from results/

For the digits grid, the first command also writes the tables of docs/algorithms. algorithm_curves.py draws the curves.
Existing runs are not repeated.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from keel.config.defaults import make_spec
from keel.config.overrides import override
from keel.paper.recipes import all_recipes
from keel.report.comparison import Comparison, compare
from keel.report.tables import final_text
from keel.runs.compare import run_jobs
from keel.runs.parallel import Job
from keel.units import size

ROOT = Path(__file__).parents[1]
RESULTS, PAGES = ROOT / "results", ROOT / "docs/algorithms"
SUMMARY = ROOT / "docs/results.md"
SEEDS = 5
MARK = "<!-- measured -->"
HEADER = ["| method | accuracy | rounds to FedAvg's final accuracy | bytes until then |", "|---|---|---|---|"]
REFERENCE = {"rounds": 30, "local.epochs": 1, "local.lr": 0.03, "evaluation.every": 1, "evaluation.last": 10}
"""Centralized training: a round is an epoch over all the data."""

PERSONALISED = ("fedper", "ditto")
"""Methods whose clients have models of their own."""

CURVES = """\
The curves are means over seeds, in a band from the lowest to the highest seed; one class per client. The first task has
the hyper-parameters of the table (three seeds, `python tools/algorithm_curves.py run`); {second}"""
SEARCHED = """\
on the others each method has
its own search ([ten and five seeds](../reproduction.md#not-in-the-paper-every-method-on-a-ladder-of-tasks-ladder))."""
TRANSFERRED = """\
the second has the same, at
which most methods do not train ([why](../choosing.md#then-tune-it))."""
Row = dict[str, Any]


def best_points(grid: Path) -> dict[str, Row]:
    """Return each method's fields at the best point of its grid."""
    setting = tomllib.loads(grid.read_text())["setting"]
    rows = [row for row in json.loads(grid.with_suffix(".json").read_text()) if row["best"]]
    return {row["algorithm"]: setting | {k: v for k, v in row.items() if "." in k} for row in rows}


def run_methods(points: dict[str, Row], folder: Path) -> Comparison:
    specs = [
        make_spec(override({"algorithm": {"name": name}, "seed": seed}, [f"{k}={json.dumps(v)}" for k, v in p.items()]))
        for name, p in points.items()
        for seed in range(SEEDS)
    ]
    return compare(run_jobs([Job(spec, folder / spec.label) for spec in specs], quiet=False), baseline="fedavg")


def shown_methods(name: str) -> list[str]:
    """Return the methods on a method's page: itself and, for federated methods, FedAvg and FedHBM."""
    return [name] if name == "centralized" else list(dict.fromkeys([name, "fedavg", "fedhbm"]))


def table(rows: list[Row], names: list[str] | None = None) -> str:
    """Return a Markdown table with the rows in the order of `names`; by default the fastest method is first."""
    by_name = {row["algorithm"]: row for row in rows}
    fastest = sorted(rows, key=lambda row: (row["rounds_to_target"] or 10**9, -(row["accuracy_mean"] or 0)))
    lines = list(HEADER)
    for row in fastest if names is None else [by_name[name] for name in names]:
        rounds = row["rounds_to_target"] or ("never" if row["target"] else "-")
        lines.append(f"| {row['label']} | {final_text(row)} | {rounds} | {size(row['bytes_to_target'])} |")
    return "\n".join(lines)


def measured_section(name: str, rows: list[Row]) -> str:
    """Return the section of a method's page with its results."""
    text = (
        "Digits, one class per client, 10 of 100 clients per round, 300 rounds, five seeds, at the best point of\n"
        "[the grid](../../results/digits_grid.toml). `make experiment` repeats the runs."
    )
    if name == "centralized":
        text = (
            f"Digits, {REFERENCE['rounds']} epochs, momentum 0.9, learning rate {REFERENCE['local.lr']}, batch size 8, "
            "five seeds, accuracy averaged over\nthe last ten epochs. `make experiment` repeats the runs."
        )
    if name in PERSONALISED:
        text += "\nThis is the accuracy of the server's model; [personal models](#personal-models) are measured above."
    curve = f"![Accuracy over rounds](../images/algorithms/{name}.svg)"
    if name == "centralized":
        return f"{MARK}\n\n## Measured\n\n{text}\n\n{table(rows, shown_methods(name))}\n\n{curve}\n"
    legend = CURVES.format(second=SEARCHED if name in all_recipes()["ladder"].desktop[0].methods else TRANSFERRED)
    return f"{MARK}\n\n## Measured\n\n{text}\n\n{table(rows, shown_methods(name))}\n\n{curve}\n\n{legend}\n"


def pages() -> dict[Path, str]:
    """Return the pages with the tables that results/ gives."""
    rows = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("digits", "digits_scarce")}
    texts = {}
    for row in rows["digits"]:
        page = PAGES / f"{row['algorithm']}.md"
        texts[page] = page.read_text().split(MARK)[0] + measured_section(row["algorithm"], rows["digits"])
    tables = iter([table(rows["digits"]), table(rows["digits_scarce"])])
    pattern = re.escape("\n".join(HEADER)) + r"(\n\|.*)+"
    texts[SUMMARY] = re.sub(pattern, lambda _: next(tables), SUMMARY.read_text())
    return texts


def write_pages() -> None:
    for path, text in pages().items():
        path.write_text(text)


def main(grid: Path) -> None:
    name = grid.stem.removesuffix("_grid")
    points = best_points(grid) | ({"centralized": REFERENCE} if name == "digits" else {})
    comparison = run_methods(points, ROOT / "runs" / name)
    rows = comparison.rows()
    (RESULTS / f"{name}.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    write_pages()
    print(table(rows))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pages"]:
            write_pages()
        case [path]:
            main(Path(path))
        case _:
            sys.exit(__doc__)
