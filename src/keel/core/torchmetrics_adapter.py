"""Metrics of torchmetrics by name or as objects. The one module that imports torchmetrics or knows its internals."""

import re
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics import classification, regression, text
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from keel.core.metrics import as_number, counted_targets
from keel.errors import KeelError, unknown_name

SHORT = {
    "f1": "F1Score",
    "mae": "MeanAbsoluteError",
    "mse": "MeanSquaredError",
    "rmse": "MeanSquaredError",
    "mape": "MeanAbsolutePercentageError",
    "r2": "R2Score",
    "pearson": "PearsonCorrCoef",
    "spearman": "SpearmanCorrCoef",
    "matthews": "MatthewsCorrCoef",
}
"""The usual names of metrics whose class has another."""
NOT_ONE_NUMBER = {"ConfusionMatrix", "ROC", "PrecisionRecallCurve", "StatScores", "FBetaScore"} | {
    f"{one}At{fixed}{other}"
    for fixed in ("", "Fixed")
    for one in ("Precision", "Recall", "Sensitivity", "Specificity")
    for other in ("Precision", "Recall", "Sensitivity", "Specificity")
}
"""Metrics that return several numbers or require settings."""
PREFIXES = {"classification": "Multiclass", "sequence": "Multiclass", "multilabel": "Multilabel"}
TOP_K = re.compile(r"top_?(\d+)(_accuracy)?")
JOINED: dict[Any, Any] = {dim_zero_sum: torch.add, dim_zero_max: torch.maximum, dim_zero_min: torch.minimum}


@dataclass(frozen=True)
class TorchMetric:
    """A metric of torchmetrics."""

    name: str
    metric: torchmetrics.Metric
    task: str
    specials: tuple[int, ...] = ()

    @property
    def maximize(self) -> bool | None:
        return self.metric.higher_is_better

    def state(self, outputs: Tensor, targets: Tensor) -> list[Tensor]:
        predictions, targets = self._arguments(outputs, targets)
        if not self._joinable:
            return [predictions, targets]
        metric = self._new()
        metric.update(predictions, targets)
        return [_joined(getattr(metric, name)) for name in metric._defaults]

    def value(self, states: Sequence[list[Tensor]]) -> float:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = self._value(states)
        undefined = any("meaningless" in str(warning.message) for warning in caught)  # such as no positive examples
        return nan if undefined else value

    def _value(self, states: Sequence[list[Tensor]]) -> float:
        metric = self._new()
        if not self._joinable:
            metric.update(*(torch.cat(parts) for parts in zip(*states, strict=True)))
            return as_number(self.name, metric.compute())
        for name, parts in zip(metric._defaults, zip(*states, strict=True), strict=True):
            setattr(
                metric, name, _reduced(parts, metric._reductions[name], is_list=isinstance(getattr(metric, name), list))
            )
        metric._update_count = len(states)
        return as_number(self.name, metric.compute())

    @property
    def _joinable(self) -> bool:
        """Whether the states of chunks can be joined exactly; otherwise predictions are collected.

        A metric that combines or wraps others has no states of its own.
        """
        reductions = self.metric._reductions.values()
        return bool(reductions) and all(reduction in {*JOINED, dim_zero_cat} for reduction in reductions)

    def _new(self) -> torchmetrics.Metric:
        metric = deepcopy(self.metric)
        metric.reset()
        return metric

    def _arguments(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as torchmetrics takes them: probabilities for labels."""
        if self.task == "regression":
            shaped = outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else outputs
            return shaped.reshape(len(shaped), -1).squeeze(1), targets.reshape(len(targets), -1).squeeze(1)
        if self.task == "multilabel":
            return outputs.sigmoid(), targets.long()
        if self.task == "sequence":
            counted = counted_targets(targets, self.specials)
            outputs, targets = outputs[counted], targets[counted]
            if isinstance(self.metric, text.Perplexity):
                return outputs[None], targets[None]
        return outputs.softmax(-1), targets


def _joined(state: Tensor | list[Tensor]) -> Tensor:
    return (
        state
        if isinstance(state, Tensor)
        else torch.cat([part.reshape(1) if part.dim() == 0 else part for part in state])
    )


def _reduced(parts: Sequence[Tensor], reduction: Any, is_list: bool) -> Tensor | list[Tensor]:
    if reduction is dim_zero_cat:
        return list(parts) if is_list else torch.cat(list(parts))
    total = parts[0]
    for part in parts[1:]:
        total = JOINED[reduction](total, part)
    return total


def find_metric(name: str, task: str, classes: int, specials: tuple[int, ...]) -> TorchMetric:
    """Return the metric that torchmetrics has under this name, for a kind of task.

    Raises:
        KeelError: There is none, or it does not suit the task.
    """
    if (match := TOP_K.fullmatch(name)) is not None:
        if task not in ("classification", "sequence"):
            raise _unsuited(name, task)
        top_k = int(match[1])
        if not 1 <= top_k <= classes:
            raise KeelError(f"evaluation.metrics: {name!r} requires at least {top_k} classes (got {classes})")
        metric: torchmetrics.Metric = classification.MulticlassAccuracy(classes, top_k=top_k, average="micro")
        return TorchMetric(name, metric, task, specials)
    wanted = SHORT.get(name, name).replace("_", "").lower()
    if wanted == "perplexity":
        if task != "sequence":
            raise _unsuited(name, task)
        return TorchMetric(name, text.Perplexity(), task, specials)
    module, prefix = (regression, "") if task == "regression" else (classification, PREFIXES[task])
    found = {cls.lower(): cls for cls in module.__all__}.get(prefix.lower() + wanted)
    if found is None:
        raise _unsuited(name, task) if _exists(wanted) else _unknown(name, task)
    settings: dict[str, Any] = {"squared": False} if name == "rmse" else {}
    if task != "regression":
        settings = {"num_labels" if task == "multilabel" else "num_classes": classes}
    try:
        return TorchMetric(name, getattr(module, found)(**settings), task, specials)
    except (TypeError, ValueError) as error:
        raise KeelError(
            f"evaluation.metrics: {name!r} needs settings ({str(error).splitlines()[0]}); pass a torchmetrics object "
            "with keel.run(metrics=[...]), or name a function as module:name"
        ) from error


def of_object(metric: torchmetrics.Metric, task: str, specials: tuple[int, ...]) -> TorchMetric:
    """Return a metric for a torchmetrics object that a user made; its name is that of its class."""
    if isinstance(metric, torchmetrics.MetricCollection):
        raise KeelError("evaluation.metrics: a MetricCollection is not supported; list its metrics one by one")
    bare = re.sub(r"^(Binary|Multiclass|Multilabel)(?=[A-Z])", "", type(metric).__name__)
    return TorchMetric(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower(), metric, task, specials)


def _exists(wanted: str) -> bool:
    names = {cls.lower() for cls in (*classification.__all__, *regression.__all__, "Perplexity")}
    return wanted in names or any(prefix.lower() + wanted in names for prefix in PREFIXES.values())


def names(task: str) -> list[str]:
    """Return the names of the metrics that suit a kind of task."""
    module, prefix = (regression, "") if task == "regression" else (classification, PREFIXES[task])
    classes = [cls.removeprefix(prefix) for cls in module.__all__ if cls.startswith(prefix)]
    classes = [cls for cls in classes if cls not in NOT_ONE_NUMBER]
    short = [name for name, cls in SHORT.items() if cls in classes]
    return sorted([*short, *(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls).lower() for cls in classes)])


def _unsuited(name: str, task: str) -> KeelError:
    return KeelError(
        f"evaluation.metrics: {name!r} does not suit {task} targets; use one of {', '.join(names(task)[:8])}, ..., or "
        "name the task of the data, as in task = 'regression'"
    )


def _unknown(name: str, task: str) -> KeelError:
    return unknown_name("evaluation.metrics", name, {*names(task), "accuracy"}, "or module:name")
