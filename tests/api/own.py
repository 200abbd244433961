"""What a user brings: data, a model, a loss and an algorithm, none of which can be pickled."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import keel

SPEC = {
    "rounds": 3,
    "local": {"lr": 0.1, "epochs": 1, "batch": 8},
    "participation": {"rate": 0.5},
    "evaluation": {"every": 1, "last": 1},
    "engine": {"name": "serial"},
}


def own_data(seed: int = 0) -> keel.FederatedData:
    labels = np.repeat(np.arange(4), 12)
    inputs = np.random.default_rng(0).normal(size=(48, 6)) + 3 * np.eye(4, 6)[labels]
    return keel.federate(inputs, labels, test=(inputs, labels), clients=6, alpha=0.5, seed=seed)


def own_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)

    class Local(nn.Module):
        """A class that no other process can import, with an attribute that cannot be pickled."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.scale = lambda x: 1.0 * x

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.scale(x))

    return Local()


def own_loss(smoothing: float = 0.1) -> Any:
    return lambda outputs, targets: nn.functional.cross_entropy(
        outputs, targets, reduction="none", label_smoothing=smoothing
    )


def own_algorithm(**settings: float) -> keel.Algorithm:
    @keel.hyperparameters
    class Scaled(keel.Algorithm):
        """FedAvg with scaled gradients."""

        name = "scaled"
        title = "Scaled"
        paper = "none"

        scale: float = 1.0

        def direction(self, w, gradient, received, state, ctx):  # type: ignore[no-untyped-def]
            return self.scale * gradient(w)

    return Scaled(**settings)
