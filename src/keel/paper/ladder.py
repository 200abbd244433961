"""The statistics of methods by tasks: ranks over tasks, and the methods that a task does not separate from its best."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from keel.paper.results import Result, Row, seed_values
from keel.report.significance import LEVEL, Ranking, holm, paired_difference, rank_methods


def task_scores(part: Row) -> dict[str, float]:
    """Return the mean accuracy of each method that was run; a method that diverged is below all others."""
    scores = {}
    for row in part["rows"]:
        if row.get("accuracy_mean") is not None:
            scores[row["label"]] = row["accuracy_mean"]
        elif row.get("status") == "diverged":
            scores[row["label"]] = -inf
    return scores


def rank_ladder(result: Result) -> Ranking | None:
    """Rank methods over the tasks that have all of them."""
    tasks = [scores for part in result["parts"] if (scores := task_scores(part))]
    names = common_methods(tasks)
    complete = [scores for scores in tasks if scores.keys() >= set(names)]
    return rank_methods([{name: scores[name] for name in names} for scores in complete])


def common_methods(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the methods to compare over the tasks that have all of them.

    Of the possible selections, the one with the most results; of equals, the one with the most tasks.
    """

    def extent(names: list[str]) -> tuple[int, int]:
        count = sum(task.keys() >= set(names) for task in tasks)
        return len(names) * count, count

    return max(map(list, tasks), key=extent, default=[])


def level_with_best(part: Row) -> dict[str, bool]:
    """Return the methods of a part that are not significantly below the best one, and whether each is the best.

    The p values of the paired differences are corrected for the number of methods. A method without two seeds in common
    with the best one is left out.
    """
    rows = {row["label"]: row for row in part["rows"] if row.get("accuracy_mean") is not None}
    if len(rows) < 2:
        return {}
    best = max(rows, key=lambda label: rows[label]["accuracy_mean"])
    differences = {
        label: paired_difference(seed_values(rows[best]), seed_values(row))
        for label, row in rows.items()
        if label != best
    }
    measured = {label: each for label, each in differences.items() if each is not None and each.measured}
    corrected = holm([each.p for each in measured.values()])
    return {best: True} | {label: False for label, p in zip(measured, corrected, strict=True) if p >= LEVEL}
