"""The cost until FedAvg's final accuracy over several tasks: rounds, bytes and modelled transfer time, with intervals.

A cost is relative to FedAvg's with the same seed, and averaged geometrically over seeds and tasks.
"""

from dataclasses import dataclass
from math import exp

from keel.algorithms import algorithm_class, describe
from keel.config.network import Network
from keel.paper.claims import Task, find_tasks, is_iid, log_rounds
from keel.paper.ladder import common_methods
from keel.paper.results import Result, Row
from keel.report.significance import Difference, mean_over_tasks, paired_difference

BASELINE = "FedAvg"
NETWORK = Network(latency_ms=0)
"""The default network, without latency: messages much larger than those of these tasks."""


@dataclass(frozen=True)
class RelativeCost:
    """What a method spends until it first reaches FedAvg's final accuracy, relative to FedAvg."""

    label: str
    rounds: Difference
    bytes: Difference
    seconds: Difference
    reached: int
    """The number of runs that reached the target; the others count with all their rounds."""
    runs: int


def relative_costs(result: Result) -> tuple[list[Task], list[RelativeCost]]:
    """Return the non-IID tasks that have the methods to compare, and the cost of each of these methods."""
    tasks = find_tasks({result["name"]: result}, [result["name"]])
    rows = [{row["label"]: row for row in task.rows if len(log_rounds(task.part, row)) > 1} for task in tasks]
    names = common_methods([each for each in rows if BASELINE in each])
    pairs = [
        (task, each) for task, each in zip(tasks, rows, strict=True) if not is_iid(task) and each.keys() >= set(names)
    ]
    if len(names) < 2 or not pairs:
        return [], []
    return [task for task, _ in pairs], [_relative_cost(label, pairs) for label in names]


def _relative_cost(label: str, pairs: list[tuple[Task, dict[str, Row]]]) -> RelativeCost:
    differences = (
        paired_difference(log_rounds(task.part, rows[BASELINE]), log_rounds(task.part, rows[label]))
        for task, rows in pairs
    )
    rounds = mean_over_tasks([each for each in differences if each is not None])
    down, up = _messages(pairs[0][1][label]["algorithm"])
    seconds = _transfer(down, up) / _transfer(1, 1)
    reached = [each for _, rows in pairs for each in rows[label]["rounds_to_target_seeds"]]
    return RelativeCost(
        label,
        rounds.map(exp),
        rounds.map(lambda value: (down + up) / 2 * exp(value)),
        rounds.map(lambda value: seconds * exp(value)),
        sum(each is not None for each in reached),
        len(reached),
    )


def _messages(algorithm: str) -> tuple[float, float]:
    """Return the model-sized vectors that a client receives and sends in a round."""
    described = describe(algorithm_class(algorithm))
    return described["down"], described["up"]


def _transfer(down: float, up: float) -> float:
    return NETWORK.round_seconds(0, 0, [0], down, up, 0.0)
