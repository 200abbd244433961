"""The engines, and the rule that chooses one: by the task alone, never by a clock, so that equal specs agree."""

import sys
from dataclasses import replace
from math import ceil

import torch
from torch import nn

from keel.devices import cores
from keel.engines.base import CPU, Absent, Engine, Problem, RoundWork
from keel.engines.batched import has_hooks, is_chain
from keel.engines.cluster import Cluster
from keel.engines.cohort import Cohort
from keel.engines.pool import Pool
from keel.engines.ray import Ray
from keel.engines.serial import Serial
from keel.errors import KeelError
from keel.models.fourier import FourierConv2d
from keel.models.resnet import Block
from keel.task import Task, per_example_cross_entropy

FORKS = sys.platform == "linux"
"""Whether processes can be forked with PyTorch in them."""
COHORT_PARAMETERS = 200_000
"""Above this the arithmetic of one client fills a core and batching no longer pays."""
DEVICE_PARAMETERS = 5_000_000
"""Above this the same holds for an accelerator."""
PLAIN = {nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d}
PLAIN |= {FourierConv2d, Block, nn.AdaptiveAvgPool2d, nn.GroupNorm, nn.LayerNorm, nn.GELU, nn.Identity}
"""Layers that do the same whatever their values are."""


def make_engine(name: str, problem: Problem, workers: int, cluster: Cluster | None = None) -> Engine:
    """The engine of that name, with so many workers if it has any: on a cluster, its actors."""
    chosen = choose(name, problem.task, problem.device)
    if problem.compile and chosen != "cohort":
        raise KeelError(
            f"engine.compile: is of the engine 'cohort', not of {chosen!r}; accepted: engine.name = 'cohort'"
        )
    if cluster is not None:
        here = replace(problem, device=CPU)  # of the driver, which need not have what its actors have
        return Ray(Cohort(here) if chosen == "cohort" else Serial(here), problem, workers, cluster)
    match chosen:
        case "cohort":
            shared = FORKS and workers > 1 and problem.device == CPU
            return Pool(Cohort(problem), workers) if shared else Cohort(problem)
        case "pool":
            if problem.device != CPU:
                raise KeelError(
                    f"engine.name: 'pool' is of processor cores, but engine.device is {str(problem.device)!r}; "
                    "accepted: 'serial', 'cohort'"
                )
            if not FORKS:
                raise KeelError("engine.name: 'pool' needs Linux, where processes fork; accepted: 'serial', 'cohort'")
            return Pool(Serial(problem), workers) if workers > 1 else Serial(problem)  # which has the same bits
        case _:
            return Serial(problem)


def at_once(engine: str, workers: int, cohort: int) -> int:
    """How many processes train at a time, of a cohort of so many clients."""
    groups = {"serial": 1, "pool": cohort, "ray": cohort}.get(engine, ceil(cohort / Cohort.group))
    return max(1, min(workers, groups))


def choose(name: str, task: Task, device: torch.device = CPU) -> str:
    """`name`, or for "auto": cohort for small models of plain layers, for the rest pool (serial where none can be).

    On an accelerator one small model cannot fill the device: there cohort is also for plain convolution nets. A
    forward pass, a hook or a loss of the user's own may branch on its values, which a batched program cannot: there
    cohort has to be asked for by name.
    """
    if name != "auto":
        return name
    parameters = sum(p.numel() for p in task.module.parameters())
    known_loss = task.loss is per_example_cross_entropy
    if device != CPU:
        known_parts = all(type(part) in PLAIN for part in task.module.modules())
        plain = known_parts and not has_hooks(task.module) and not task.moving
        return "cohort" if known_loss and plain and parameters <= DEVICE_PARAMETERS else "serial"
    if known_loss and parameters <= COHORT_PARAMETERS and is_chain(task.module):
        return "cohort"
    return "pool" if FORKS else "serial"


__all__ = [
    "Absent",
    "Cluster",
    "Engine",
    "Problem",
    "RoundWork",
    "at_once",
    "choose",
    "cores",
    "make_engine",
]
