"""The workloads that contenders are timed on. Data are made up: the arithmetic is the same."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import published
import torch
from torch import nn

from keel.data.federated import Examples, FederatedData, Partition
from keel.data.preparation import AsStored, Preparation, Tokens
from keel.models import build


@dataclass(frozen=True)
class Workload:
    """A cohort of `cohort` clients, each with `steps` minibatches of `batch`, of `clients` in all."""

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    steps: int
    batch: int
    rounds: int
    held: int | None = None
    """Examples of a client, where they are fewer than its steps see; clients share them then."""

    @property
    def heavy(self) -> bool:
        """Whether a round takes seconds."""
        return self.model != "mlp"

    def data(self) -> FederatedData:
        rng = np.random.default_rng(0)
        held = self.held or self.steps * self.batch
        examples = min(self.clients * held, 20_000) if self.held else self.clients * held
        text = self.model.endswith("lstm")
        inputs = (
            rng.integers(0, self.classes, (examples, *self.shape))
            if text
            else rng.random((examples, *self.shape), np.float32)
        )
        tensor = torch.from_numpy(inputs.astype(np.uint8) if text else inputs)
        train = Examples(tensor, torch.from_numpy(rng.integers(0, self.classes, examples)))
        indices = np.arange(self.clients * held, dtype=np.int32)
        indices %= examples
        partition = Partition(indices, np.arange(0, self.clients * held + 1, held, dtype=np.int32))
        prepare: Preparation = Tokens() if text else AsStored()
        return FederatedData("bench", train, train[np.arange(64)], partition, self.classes, prepare)

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return build(self.model, self.shape, self.classes, {})

    def published(self) -> nn.Module:
        """As it is in the literature."""
        match self.model:
            case "lenet":
                return published.lenet(self.classes)
            case "resnet20":
                return published.resnet20(self.classes)
            case _:
                return self.module()


DIGITS: dict[str, Any] = {"model": "mlp", "shape": (64,), "classes": 10, "steps": 8, "batch": 8}
IMAGES: dict[str, Any] = {"shape": (3, 32, 32), "classes": 10, "clients": 100, "cohort": 10, "steps": 8, "batch": 64}
COUNTS = {f"n={n:,}": n for n in (10**2, 10**3, 10**4, 10**5, 10**6)}
"""Of clients, of whom ten take part in a round."""
WORKLOADS = {
    "digits": Workload(**DIGITS, clients=100, cohort=10, rounds=200),
    "many": Workload(**DIGITS, clients=1000, cohort=100, rounds=40),
    "lenet": Workload("lenet", **IMAGES, rounds=3),
    "resnet20": Workload("resnet20", **IMAGES, rounds=1),
    "shakespeare": Workload("char_lstm", (80,), 80, 100, 10, 20, 100, rounds=1),
    **{name: Workload(**DIGITS, clients=n, cohort=10, rounds=200, held=8) for name, n in COUNTS.items()},
}
