"""The shape of every federated data set: arrays that all clients share, and who holds which examples."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keel.errors import KeelError


@dataclass(frozen=True)
class Examples:
    """Inputs with their targets, in one order."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise KeelError(
                f"data: {len(self.inputs)} inputs but {len(self.targets)} labels; accepted: as many of each"
            )
        if len(self.inputs) == 0:
            raise KeelError("data: no examples; accepted: at least one")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, indices: np.ndarray | Tensor) -> "Examples":
        indices = torch.as_tensor(indices)
        return Examples(self.inputs[indices], self.targets[indices])


@dataclass(frozen=True)
class Partition:
    """Who holds what: client i holds the examples indices[offsets[i]:offsets[i + 1]]. No object per client."""

    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            raise KeelError(f"data: client {empty[0]} has no examples; accepted: at least one for each client")

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __getitem__(self, client: int) -> np.ndarray:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> "Partition":
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(np.concatenate(parts).astype(np.int64), offsets)


@dataclass(frozen=True)
class FederatedData:
    """Each client's part of `train`, and `test` for everybody. `classes` is 0 where the targets are no labels."""

    name: str
    train: Examples
    test: Examples
    partition: Partition
    classes: int

    @classmethod
    def of(cls, name: str, train: Examples, test: Examples, partition: Partition) -> "FederatedData":
        """With as many classes as the labels tell."""
        if train.inputs.shape[1:] != test.inputs.shape[1:]:
            raise KeelError(
                f"data.test_inputs: shape {tuple(test.inputs.shape[1:])} of an input; "
                f"accepted: {tuple(train.inputs.shape[1:])}, as in data.inputs"
            )
        return cls(name, train, test, partition, 1 + int(max(train.targets.max(), test.targets.max())))

    def client(self, client: int) -> Examples:
        return self.train[self.partition[client]]
