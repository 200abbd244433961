"""The workloads of the benchmarks. Their data are random numbers of realistic shapes: the arithmetic is the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import classes
import numpy as np
import torch
from torch import nn

from keel.core.examples import Examples, FederatedData, Partition
from keel.core.transforms import Identity, Transform
from keel.data.transforms import Tokens
from keel.models import build


@dataclass(frozen=True)
class Workload:
    """Rounds of `cohort` out of `clients` clients, each with `steps` minibatches of `batch` examples."""

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    steps: int
    batch: int
    rounds: int
    examples_per_client: int | None = None
    """If set, clients share a pool of examples, so that a million of them fit in memory. Default: steps * batch."""

    @property
    def heavy(self) -> bool:
        """Whether a round takes seconds."""
        return self.model in ("lenet", "resnet20", "char_lstm")

    @property
    def built_in(self) -> bool:
        """Whether Keel has a version of the model of its own."""
        return self.model in BUILT_IN

    def data(self) -> FederatedData:
        rng = np.random.default_rng(0)
        size = self.examples_per_client or self.steps * self.batch
        examples = min(self.clients * size, 20_000) if self.examples_per_client else self.clients * size
        text = self.model in ("char_lstm", "transformer")
        inputs = (
            rng.integers(0, 64, (examples, *self.shape)) if text else rng.random((examples, *self.shape), np.float32)
        )
        tensor = torch.from_numpy(inputs.astype(np.uint8) if text else inputs)
        train = Examples(tensor, torch.from_numpy(rng.integers(0, self.classes, examples)))
        indices = np.arange(self.clients * size, dtype=np.int32)
        indices %= examples
        partition = Partition(indices, np.arange(0, self.clients * size + 1, size, dtype=np.int32))
        transform: Transform = Tokens() if text else Identity()
        return FederatedData("bench", train, train[np.arange(64)], partition, self.classes, transform)

    def module(self) -> nn.Module:
        """Keel's version of the model."""
        torch.manual_seed(0)
        return build(self.model, self.shape, self.classes, {})

    def user_class(self) -> nn.Module:
        """The model as a user writes it."""
        torch.manual_seed(0)
        return CLASSES[self.model](self.classes)


CLASSES: dict[str, Callable[[int], nn.Module]] = {
    "mlp": classes.MLP,
    "layernorm": classes.LayerNormMLP,
    "small_cnn": classes.SmallCNN,
    "lenet": classes.LeNet,
    "resnet20": classes.resnet20,
    "char_lstm": classes.CharLSTM,
    "transformer": classes.Transformer,
}
BUILT_IN = ("mlp", "lenet", "resnet20", "char_lstm")
"""The models of which Keel has a version of its own."""
DIGITS: dict[str, Any] = {"model": "mlp", "shape": (64,), "classes": 10, "steps": 8, "batch": 8}
IMAGES: dict[str, Any] = {"shape": (3, 32, 32), "classes": 10, "clients": 100, "cohort": 10, "steps": 8, "batch": 64}
COUNTS = {f"n={n:,}": n for n in (10**2, 10**3, 10**4, 10**5, 10**6)}
"""Numbers of clients; ten of them take part in a round."""
WORKLOADS = {
    "digits": Workload(**DIGITS, clients=100, cohort=10, rounds=200),
    "many": Workload(**DIGITS, clients=1000, cohort=100, rounds=40),
    "layernorm": Workload("layernorm", (64,), 10, 100, 10, 8, 8, rounds=100),
    "cnn": Workload("small_cnn", (1, 8, 8), 10, 100, 10, 8, 8, rounds=60),
    "transformer": Workload("transformer", (16,), 4, 100, 10, 8, 16, rounds=20),
    "lenet": Workload("lenet", **IMAGES, rounds=3),
    "resnet20": Workload("resnet20", **IMAGES, rounds=1),
    "shakespeare": Workload("char_lstm", (80,), 80, 100, 10, 20, 100, rounds=1),
    **{name: Workload(**DIGITS, clients=n, cohort=10, rounds=200, examples_per_client=8) for name, n in COUNTS.items()},
}
