"""The engines, and the rule that chooses one: by the task alone, never by a clock, so that equal specs agree."""

from collections.abc import Callable

from torch import nn

from keel.engines.base import Engine, Problem, RoundWork
from keel.engines.cohort import Cohort
from keel.engines.serial import Serial
from keel.task import Task, per_example_cross_entropy

ENGINES: dict[str, Callable[[Problem], Engine]] = {"serial": Serial, "cohort": Cohort}

COHORT_PARAMETERS = 200_000
"""Above this the arithmetic of one client fills a core and batching no longer pays."""
_BATCHABLE = (nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.LayerNorm)


def make_engine(name: str, problem: Problem) -> Engine:
    return ENGINES[choose(name, problem.task)](problem)


def choose(name: str, task: Task) -> str:
    """`name`, or for "auto": cohort for small models of plain layers, serial for the rest.

    A forward pass or a loss of the user's own may branch on its values, which a batched program cannot: there cohort
    has to be asked for by name.
    """
    if name != "auto":
        return name
    small = sum(p.numel() for p in task.module.parameters()) <= COHORT_PARAMETERS
    plain = all(type(part) in _BATCHABLE for part in task.module.modules())
    return "cohort" if small and plain and task.loss is per_example_cross_entropy else "serial"


__all__ = ["ENGINES", "Engine", "Problem", "RoundWork", "choose", "make_engine"]
