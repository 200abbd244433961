"""Observers that measure client drift: `evaluation.drift` and `evaluation.deviation`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import acos, degrees, isfinite
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from keel.core.client import ClientResult
from keel.core.engine import Dropped
from keel.core.observers import Observer, RoundEnd, finite
from keel.errors import KeelError

PREFIX = "keel.deviation."
"""Of the names under which Deviation keeps its tensors in the training state."""


class Drift(Observer):
    """Measures how far local models move from the server's, and the angle between the momentum and the server's step.

    The angle is recorded for algorithms whose momentum `m` is as long as the model, once it is not zero.
    """

    def round_started(self, round: int) -> None:
        self.distances: list[float] = []

    def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
        if "delta" in result.message:
            self.distances.append(float(torch.linalg.vector_norm(result.message["delta"])))

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any]:
        fields = {"drift": finite(fmean(self.distances))} if self.distances else {}
        momentum = event.work.received.get("m", event.server.get("m"))
        step = event.state.server["theta"] - event.server["theta"]
        if momentum is not None and momentum.shape == step.shape:
            norms = torch.linalg.vector_norm(momentum) * torch.linalg.vector_norm(step)
            if norms > 0:
                cosine = float(torch.dot(momentum, step) / norms)
                angle = degrees(acos(max(-1.0, min(1.0, cosine)))) if isfinite(cosine) else None
                fields["momentum_angle"] = angle
        return fields


class Deviation(Observer):
    """Measures how far the mean of the last tau pseudo-gradients is from that of all clients, relative to its norm.

    Every client trains in every evaluated round for this. A tau is omitted until tau rounds exist.
    """

    def __init__(self, taus: Sequence[int]):
        self.taus = taus

    def round_started(self, round: int) -> None:
        self.pseudo_gradient: Tensor | None = None

    def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
        if "delta" in result.message:
            if self.pseudo_gradient is None:
                self.pseudo_gradient = torch.zeros_like(result.message["delta"])
            self.pseudo_gradient.add_(result.message["delta"], alpha=weight)

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any]:
        kept = event.state.observed
        history = [kept[name] for name in sorted(kept) if name.startswith(PREFIX)]
        if self.pseudo_gradient is None:
            self.pseudo_gradient = torch.zeros_like(event.server["theta"])
        history = [*history, self.pseudo_gradient][-max(self.taus) :]
        kept |= {f"{PREFIX}{number:06}": update for number, update in enumerate(history)}
        if not event.evaluated:
            return {}
        full = _full_participation(event)
        norm = torch.linalg.vector_norm(full)
        means = {tau: torch.stack(history[-tau:]).mean(dim=0) for tau in self.taus if len(history) >= tau}
        distances = {str(tau): torch.linalg.vector_norm(mean - full) / norm for tau, mean in means.items()}
        return {"deviation": {tau: finite(float(distance)) for tau, distance in distances.items()}}


def _full_participation(event: RoundEnd) -> Tensor:
    """The pseudo-gradient of this round if every client took part in it. No client state changes."""
    loop, clients = event.loop, event.loop.participation.all_clients
    states, buffers = loop.client_inputs(clients, event.state)
    work = replace(event.work, cohort=clients, client_states=states, buffers=buffers)
    mean: Tensor | None = None
    for weight, result in zip(loop.participation.weights(clients), loop.engine.train(work), strict=True):
        if isinstance(result, Dropped):
            raise KeelError(f"evaluation.deviation requires a reply from every client ({result.reason})")
        if "delta" not in result.message:
            name = type(loop.algorithm).__name__
            raise KeelError(f"evaluation.deviation requires reports with 'delta', which {name} does not send")
        mean = torch.zeros_like(result.message["delta"]) if mean is None else mean
        mean.add_(result.message["delta"], alpha=weight)
    assert mean is not None
    return mean
