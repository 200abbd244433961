"""Keel: federated learning that does not drift.

    import keel

    run = keel.run({"algorithm": {"name": "fedhbm"}, "rounds": 50})
    print(run.accuracy)

Everything a program needs is here. Names are loaded when they are first used, so that `keel --help` need not wait
for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.algorithms.base import Algorithm, ClientContext, Context, Path, Report, hyperparameters, weighted_mean
    from keel.data.federated import Examples, FederatedData, Partition
    from keel.data.own import federate, from_dataset, from_partitioner
    from keel.errors import KeelError
    from keel.runs.run import Run, resume, run
    from keel.runs.spec import Spec, make_spec

_HOMES = {
    # run an experiment
    "run": "keel.runs.run",
    "resume": "keel.runs.run",
    "Run": "keel.runs.run",
    "Spec": "keel.runs.spec",
    "make_spec": "keel.runs.spec",
    # on data of one's own
    "federate": "keel.data.own",
    "from_dataset": "keel.data.own",
    "from_partitioner": "keel.data.own",
    "FederatedData": "keel.data.federated",
    "Examples": "keel.data.federated",
    "Partition": "keel.data.federated",
    # with an algorithm of one's own
    "Algorithm": "keel.algorithms.base",
    "hyperparameters": "keel.algorithms.base",
    "Context": "keel.algorithms.base",
    "ClientContext": "keel.algorithms.base",
    "Path": "keel.algorithms.base",
    "Report": "keel.algorithms.base",
    "weighted_mean": "keel.algorithms.base",
    # what goes wrong
    "KeelError": "keel.errors",
}

__all__ = [
    "Algorithm",
    "ClientContext",
    "Context",
    "Examples",
    "FederatedData",
    "KeelError",
    "Partition",
    "Path",
    "Report",
    "Run",
    "Spec",
    "federate",
    "from_dataset",
    "from_partitioner",
    "hyperparameters",
    "make_spec",
    "resume",
    "run",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
