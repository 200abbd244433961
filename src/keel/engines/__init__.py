"""The engines. What is known of them by name is here without PyTorch; what builds one is imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keel.engines.kinds import (
    AUTO,
    ENGINES,
    RECORDED,
    EngineKind,
    bit_identical,
    cluster_engine,
    engine_kind,
)

if TYPE_CHECKING:
    from keel.core.devices import cores
    from keel.core.engine import Dropped, Engine, RoundWork, Workload
    from keel.engines.ray_cluster import Cluster
    from keel.engines.selection import FORKS, Choice, choose, make_engine, make_user_engine

_HOMES = {
    "cores": "keel.core.devices",
    "Dropped": "keel.core.engine",
    "Engine": "keel.core.engine",
    "RoundWork": "keel.core.engine",
    "Workload": "keel.core.engine",
    "Cluster": "keel.engines.ray_cluster",
    "FORKS": "keel.engines.selection",
    "Choice": "keel.engines.selection",
    "choose": "keel.engines.selection",
    "make_engine": "keel.engines.selection",
    "make_user_engine": "keel.engines.selection",
}

__all__ = [
    "AUTO",
    "ENGINES",
    "FORKS",
    "RECORDED",
    "Choice",
    "Cluster",
    "Dropped",
    "Engine",
    "EngineKind",
    "RoundWork",
    "Workload",
    "bit_identical",
    "choose",
    "cluster_engine",
    "cores",
    "engine_kind",
    "make_engine",
    "make_user_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keel.engines' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
