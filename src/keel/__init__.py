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
    from keel.api.compare import compare
    from keel.api.sweep import sweep
    from keel.config.defaults import make_spec
    from keel.config.schema import Spec
    from keel.core.examples import Examples, FederatedData, Partition
    from keel.core.observers import Observer
    from keel.data.dataset import Dataset
    from keel.data.federate import federate, from_dataset, from_partitioner
    from keel.errors import KeelError
    from keel.report.comparison import Comparison
    from keel.report.report_page import ReportPage, report
    from keel.report.sweep import BestPoint, Sweep
    from keel.runs.result import Run, load
    from keel.runs.run import resume, run

_HOMES = {
    # run an experiment
    "run": "keel.runs.run",
    "resume": "keel.runs.run",
    "load": "keel.runs.result",
    "Run": "keel.runs.result",
    # run several
    "compare": "keel.api.compare",
    "Comparison": "keel.report.comparison",
    "sweep": "keel.api.sweep",
    "Sweep": "keel.report.sweep",
    "BestPoint": "keel.report.sweep",
    "report": "keel.report.report_page",
    "ReportPage": "keel.report.report_page",
    # describe an experiment
    "Spec": "keel.config.schema",
    "make_spec": "keel.config.defaults",
    # your data
    "federate": "keel.data.federate",
    "from_dataset": "keel.data.federate",
    "from_partitioner": "keel.data.federate",
    "Dataset": "keel.data.dataset",
    "FederatedData": "keel.core.examples",
    "Examples": "keel.core.examples",
    "Partition": "keel.core.examples",
    # your algorithm
    "Algorithm": "keel.algorithms.base",
    "hyperparameters": "keel.algorithms.base",
    "Context": "keel.algorithms.base",
    "ClientContext": "keel.algorithms.base",
    "Path": "keel.algorithms.base",
    "Report": "keel.algorithms.base",
    "weighted_mean": "keel.algorithms.base",
    # watch a run
    "Observer": "keel.core.observers",
    # what goes wrong
    "KeelError": "keel.errors",
}

__all__ = [
    "Algorithm",
    "BestPoint",
    "ClientContext",
    "Comparison",
    "Context",
    "Dataset",
    "Examples",
    "FederatedData",
    "KeelError",
    "Observer",
    "Partition",
    "Path",
    "Report",
    "ReportPage",
    "Run",
    "Spec",
    "Sweep",
    "compare",
    "federate",
    "from_dataset",
    "from_partitioner",
    "hyperparameters",
    "load",
    "make_spec",
    "report",
    "resume",
    "run",
    "sweep",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
