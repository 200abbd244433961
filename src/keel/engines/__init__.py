"""The engines, and the rule that chooses one: by the task alone, never by a clock, so that equal specs agree."""

import os
import sys

from keel.engines.base import Engine, Problem, RoundWork
from keel.engines.batched import is_chain
from keel.engines.cohort import Cohort
from keel.engines.pool import Pool
from keel.engines.serial import Serial
from keel.errors import KeelError
from keel.task import Task, per_example_cross_entropy

FORKS = sys.platform == "linux"
"""Whether processes can be forked with PyTorch in them."""
COHORT_PARAMETERS = 200_000
"""Above this the arithmetic of one client fills a core and batching no longer pays."""


def make_engine(name: str, problem: Problem, workers: int) -> Engine:
    """The engine of that name, with so many workers if it has any."""
    match choose(name, problem.task):
        case "cohort":
            return Pool(Cohort(problem), workers) if FORKS and workers > 1 else Cohort(problem)
        case "pool":
            if not FORKS:
                raise KeelError("engine.name: 'pool' needs Linux, where processes fork; accepted: 'serial', 'cohort'")
            return Pool(Serial(problem), workers) if workers > 1 else Serial(problem)  # which has the same bits
        case _:
            return Serial(problem)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def choose(name: str, task: Task) -> str:
    """`name`, or for "auto": cohort for small models of plain layers, for the rest pool (serial where none can be).

    A forward pass or a loss of the user's own may branch on its values, which a batched program cannot: there cohort
    has to be asked for by name.
    """
    if name != "auto":
        return name
    small = sum(p.numel() for p in task.module.parameters()) <= COHORT_PARAMETERS
    if small and is_chain(task.module) and task.loss is per_example_cross_entropy:
        return "cohort"
    return "pool" if FORKS else "serial"


__all__ = ["Engine", "Problem", "RoundWork", "choose", "cores", "make_engine"]
