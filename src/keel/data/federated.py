"""The shape of every federated data set: arrays that all clients share, and who holds which examples."""

import mmap
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from tempfile import TemporaryFile
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from keel.data.preparation import AsStored, Preparation
from keel.errors import KeelError

LARGE = 2**23
"""Bytes of a table from which on it lies in a file."""


@dataclass(frozen=True)
class Examples:
    """Inputs with their targets as they are stored, in one order. The arrays may lie in files (memory-mapped)."""

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
        """Some of them, gathered; targets as the losses want them, however small they are stored."""
        indices = torch.tensor(indices) if isinstance(indices, np.ndarray) else indices
        targets = self.targets.index_select(0, indices)  # several times as fast as [indices]
        return Examples(
            self.inputs.index_select(0, indices), targets if targets.is_floating_point() else targets.long()
        )


@dataclass(frozen=True)
class Held:
    """What one client holds of shared examples: gathered when it is used, not before."""

    examples: Examples
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: np.ndarray) -> Examples:
        return self.examples[self.rows[indices]]


@dataclass(frozen=True)
class Partition:
    """Who holds what: client i holds the examples indices[offsets[i]:offsets[i + 1]]. No object per client.

    A large table of examples lies in a file below TMPDIR, and what was read of it is let go of: clients who do not take
    part take no memory for what they hold.
    """

    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        for name, table in (("indices", _resting(_narrow(self.indices))), ("offsets", _narrow(self.offsets).view())):
            table.setflags(write=False)
            object.__setattr__(self, name, table)
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            raise KeelError(f"data: client {empty[0]} has no examples; accepted: at least one for each client")

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Of all clients, counted anew each time."""
        return np.diff(self.offsets)

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        return self.offsets[clients + 1] - self.offsets[clients]

    def __getitem__(self, client: int) -> np.ndarray:
        rows = self.indices[self.offsets[client] : self.offsets[client + 1]].copy()
        self._let_go()
        return rows

    def fingerprint(self) -> str:
        content = sha256()
        for table in (self.indices, self.offsets):
            content.update(np.ascontiguousarray(table).data)
        self._let_go()
        return content.hexdigest()

    def _let_go(self) -> None:
        """Gives the pages that were read of a table in a file back to the system."""
        if isinstance(self.indices.base, mmap.mmap):
            self.indices.base.madvise(mmap.MADV_DONTNEED)

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> "Partition":
        return cls(np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])]))


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """In 32 bits where they fit: the tables of a million clients count."""
    fits = len(numbers) == 0 or numbers.max() <= np.iinfo(np.int32).max
    return numbers.astype(np.int32 if fits else np.int64, copy=False)


def _resting(table: np.ndarray) -> np.ndarray:
    """In a file without a name, if it is large and there is room."""
    if table.nbytes < LARGE or sys.platform == "win32":  # which cannot let go of pages
        return table.view()
    try:
        with TemporaryFile() as file:
            file.write(np.ascontiguousarray(table).data)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:  # no room, or no place: memory does as well
        return table.view()
    return np.ndarray(table.shape, table.dtype, buffer=mapped)


@dataclass(frozen=True)
class Pool:
    """A data set before it is dealt out to clients.

    `keys` says who holds each training example where the set is split by nature, `test_keys` the same of the test
    examples if their holders take part in training. `rows` are the training rows that are examples, where not all
    are (the windows of a text that span two speakers). `specials` are targets that accuracy does not count; the
    first of them is padding, which is no target at all. `sha256` stands for the stored content.
    """

    train: Examples
    test: Examples
    classes: int
    keys: np.ndarray | None = None
    test_keys: np.ndarray | None = None
    rows: np.ndarray | None = None
    prepare: Preparation = field(default_factory=AsStored)
    specials: tuple[int, ...] = ()
    sha256: str | None = None


@dataclass(frozen=True, repr=False)
class FederatedData:
    """Each client's part of `train`, and `test` for everybody. `classes` is 0 where the targets are no labels."""

    name: str
    train: Examples
    test: Examples
    partition: Partition
    classes: int
    prepare: Preparation = field(default_factory=AsStored)
    specials: tuple[int, ...] = ()
    sha256: str | None = None
    here: ClassVar[bool] = True
    """Whether the examples are on this machine."""

    def __repr__(self) -> str:
        return f"<FederatedData {self.name}: {self.partition.clients} clients, {self.partition.sizes.sum()} examples>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one input as the model gets it."""
        return tuple(self.prepare(self.train.inputs[:1]).shape[1:])

    @property
    def at_once(self) -> int:
        """Examples that are computed at a time where it is free to choose: few, if one is large."""
        positions = prod(self.train.targets.shape[1:])
        return max(1, min(512, 2**22 // max(1, prod(self.input_shape)), 2**24 // max(1, positions * self.classes)))

    def held(self, client: int) -> Held:
        return Held(self.train, self.partition[client])

    def client(self, client: int) -> Examples:
        """All that a client holds, gathered."""
        return self.train[self.partition[client]]

    def fingerprint(self) -> str:
        """SHA-256 of the examples that the set was made from."""
        return self.sha256 or fingerprint(self.train, self.test)


class Elsewhere(FederatedData):
    """What others hold, seen from outside: how many examples each has and what one looks like.

    The training example is a stand-in for the shape of theirs, and all that the partition's table names; so are the
    test examples a stand-in, where nobody has any here.
    """

    here = False


def fingerprint(train: Examples, test: Examples) -> str:
    content = sha256()
    for tensor in (train.inputs, train.targets, test.inputs, test.targets):
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()
