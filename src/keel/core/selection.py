"""Model selection: the best model of a run by the primary metric, kept in the training state."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from keel.core.observers import Observer
from keel.core.records import PrimaryMetric, Record
from keel.core.training_state import TrainingState

PREFIX = "keel.best."
"""Of the names under which the best model is kept in the training state."""


class BestModel(NamedTuple):
    """A model with the round after which it was evaluated and its primary metric."""

    theta: Tensor
    buffers: Tensor | None
    """The buffers that training changes; None if the model has none."""
    round: int
    value: float


class KeepBest(Observer):
    """Keeps the model with the best primary metric; of equal ones, the first.

    It is in `state.observed`, so every checkpoint holds the best model of the rounds up to it.
    """

    def __init__(self, primary: PrimaryMetric):
        self.primary = primary

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        value = cast(dict[str, Any], record).get(self.primary.name)
        if value is None or not isfinite(value):
            return
        best = kept_best(state.observed)
        if best is None or self.primary.is_better(value, best.value):
            state.observed |= {f"{PREFIX}{name}": tensor for name, tensor in _tensors(state, value).items()}


def _tensors(state: TrainingState, value: float) -> dict[str, Tensor]:
    buffers = {} if state.buffers is None else {"buffers": state.buffers.clone()}
    return {
        "theta": state.server["theta"].clone(),
        **buffers,
        "round": torch.tensor(state.round),
        "value": torch.tensor(value, dtype=torch.float64),
    }


def kept_best(observed: Mapping[str, Tensor]) -> BestModel | None:
    """The best model among the tensors that observers keep; None if there is none."""
    if f"{PREFIX}theta" not in observed:
        return None
    return BestModel(
        observed[f"{PREFIX}theta"],
        observed.get(f"{PREFIX}buffers"),
        int(observed[f"{PREFIX}round"]),
        float(observed[f"{PREFIX}value"]),
    )
