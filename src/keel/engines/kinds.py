"""What is known of the engines by name: facts that specs, estimates and reports use without building an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from keel import registry
from keel.errors import KeelError

AUTO = "auto"
FLOWER = "flower"
ENTRY_POINTS = "keel.engines"


@dataclass(frozen=True)
class EngineKind:
    """What is known of an engine by its name alone, before one is built and after its run has ended."""

    group: int = 1
    """The largest number of clients that are trained as one batched program."""
    bit_identical: bool = False
    """Whether results equal those of `serial` to the bit."""
    parallel: bool = False
    """Whether the groups of a cohort are distributed over the workers."""
    on_cluster: bool = False
    """Whether it can run on a Ray cluster, with `engine.address` and `engine.gpus`."""
    cluster_only: bool = False
    """Whether it always runs on a Ray cluster."""
    remote: bool = False
    """Whether clients are on other machines. A spec cannot name such an engine."""

    def processes(self, workers: int, cohort: int) -> int:
        """Return how many processes train concurrently."""
        return max(1, min(workers, ceil(cohort / self.group))) if self.parallel else 1


ENGINES = {
    "serial": EngineKind(bit_identical=True),
    "cohort": EngineKind(group=32, parallel=True, on_cluster=True),
    "pool": EngineKind(bit_identical=True, parallel=True),
    "ray": EngineKind(bit_identical=True, parallel=True, on_cluster=True, cluster_only=True),
}
"""The engines that a spec can name, besides "auto"."""
RECORDED = {**ENGINES, FLOWER: EngineKind(remote=True)}
"""The engines that the record of a run can name: those of a spec, and the federation of `keel.deploy`."""


def engine_kind(name: str) -> EngineKind:
    """Return what is known of an engine by its name: built in, an entry point or "module:factory".

    Raises:
        KeelError: There is no such engine.
    """
    if name in RECORDED:
        return RECORDED[name]
    factory = user_factory(name)
    attributes = {name: getattr(factory, name, None) for name in ("group", "bit_identical", "parallel")}
    declared: dict[str, Any] = {name: value for name, value in attributes.items() if isinstance(value, int)}
    return EngineKind(**declared)


def user_factory(name: str) -> Callable[..., Any]:
    """Return the factory of a user's engine: an entry point or "module:factory".

    Raises:
        KeelError: There is no such engine, or it is not a function.
    """
    factory: Any = registry.find("engine.name", name, {AUTO: None, **ENGINES}, ENTRY_POINTS)
    if not callable(factory):
        raise KeelError(f"engine.name: {name!r} must be a function (workload, workers) -> Engine (got {factory!r})")
    return factory


def bit_identical(name: str) -> bool:
    """Return whether the engine `name` gives the bits of `serial`; False for "auto", which is not chosen yet.

    Raises:
        KeelError: There is no such engine.
    """
    return name != AUTO and engine_kind(name).bit_identical


def cluster_engine(name: str) -> str:
    """Return the engine that gives the results of the engine `name` on a Ray cluster.

    Raises:
        KeelError: There is none.
    """
    kind = engine_kind(name)
    if not (kind.on_cluster or kind.bit_identical):
        raise KeelError(f"engine.address is not supported for a run of the engine {name!r}; leave the address out")
    return name if kind.on_cluster else "ray"
