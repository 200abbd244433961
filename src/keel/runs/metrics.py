"""Finds the metrics of a run: by name in torchmetrics, as "module:name", or objects that were passed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keel import registry
from keel.core.examples import FederatedData
from keel.core.metrics import FunctionMetric, Metric
from keel.core.records import PrimaryMetric, Record
from keel.errors import KeelError

if TYPE_CHECKING:
    from keel.config.schema import EvaluationSpec

Metrics = str | Sequence[Any] | Mapping[str, Any]
"""Names, torchmetrics objects, or functions of all outputs and targets; a mapping gives them names."""
BUILT_IN = {"accuracy": True, "test_loss": False}
"""What is measured without asking, and whether larger is better."""


def make_metrics(
    metrics: Metrics, data: FederatedData, evaluation: "EvaluationSpec"
) -> tuple[tuple[Metric, ...], PrimaryMetric | None]:
    """Return the metrics that are measured besides loss and accuracy, and the primary one: the first of `metrics`.

    Args:
        metrics: Names, torchmetrics objects, or functions of all outputs and targets; a mapping gives them names.

    Raises:
        KeelError: A metric is not known, does not suit the targets, or has no direction and is the primary one.
    """
    made: dict[str, Metric | None] = {}
    metrics = [metrics] if isinstance(metrics, str) else metrics
    pairs = metrics.items() if isinstance(metrics, Mapping) else [(None, metric) for metric in metrics]
    for label, given in pairs:
        name, metric = _make(given, data, label)
        if name in made:
            raise KeelError(f"evaluation.metrics: {name!r} is given twice; give each metric once")
        made[name] = metric
    if not made:
        if evaluation.maximize is not None:
            raise KeelError("evaluation.maximize requires evaluation.metrics, whose first one it is about")
        return (), None
    first, metric = next(iter(made.items()))
    maximize = evaluation.maximize
    if maximize is None:
        maximize = BUILT_IN[first] if metric is None else metric.maximize
    if maximize is None:
        raise KeelError(
            f"evaluation.maximize must be true or false, because it is not known whether a larger {first!r}, the first "
            "metric, is better; a function may also have the attribute higher_is_better"
        )
    return tuple(metric for metric in made.values() if metric is not None), PrimaryMetric(first, maximize)


def _make(given: Any, data: FederatedData, label: str | None = None) -> tuple[str, Metric | None]:
    """Return a metric and its name. None in place of the metric is for one that is measured without asking."""
    if isinstance(given, str) and label is None:
        if given in BUILT_IN:
            if given == "accuracy" and not data.classes:
                if data.kind == "multilabel":
                    return given, _named(given, data)
                raise KeelError(f"evaluation.metrics: 'accuracy' requires class labels, not targets for {data.kind}")
            return given, None
        if ":" not in given:
            return given, _named(given, data)
        found = registry.imported("evaluation.metrics", given)
        return _of_object(found() if isinstance(found, type) else found, data)
    return _of_object(given, data, label)


def _named(name: str, data: FederatedData) -> Metric:
    from keel.core.torchmetrics_adapter import find_metric  # torchmetrics takes a second to import

    return find_metric(name, data.kind, data.outputs, data.specials)


def _of_object(given: Any, data: FederatedData, label: str | None = None) -> tuple[str, Metric]:
    if isinstance(given, type):
        raise KeelError(f"evaluation.metrics: use {given.__name__}(...) instead of the class")
    if hasattr(given, "update") and hasattr(given, "compute"):
        from keel.core.torchmetrics_adapter import of_object

        metric: Metric = of_object(given, data.kind, data.specials)
    elif callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        metric = FunctionMetric(name, given, getattr(given, "higher_is_better", None))
    else:
        raise KeelError(
            f"evaluation.metrics must be names, torchmetrics objects or functions (outputs, targets) (got {given!r})"
        )
    if label is not None:
        metric = replace(metric, name=label)  # type: ignore[type-var]
    if metric.name in Record.__annotations__ or not metric.name.isidentifier():
        raise KeelError(
            f"evaluation.metrics: {metric.name!r} cannot name a metric, because the records have that key or it is not "
            "an identifier; name metrics with a mapping, as in metrics={'name': function}"
        )
    return metric.name, metric
