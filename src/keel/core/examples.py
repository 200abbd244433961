"""Federated data: arrays of examples that all clients share, and the partition that assigns examples to clients."""

import mmap
import sys
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from tempfile import TemporaryFile
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from keel.core.packing import Packing
from keel.core.stored_inputs import Items, byte_parts
from keel.core.transforms import Identity, Transform
from keel.errors import KeelError

FILE_BACKED_FROM = 2**23
"""The size in bytes from which a partition's index table is kept in a file instead of in memory."""


TaskKind = Literal["classification", "sequence", "regression", "multilabel"]
"""What targets are: a class, a class at each position of a sequence, numbers, or 0 or 1 for each of some labels."""


@dataclass(frozen=True)
class Examples:
    """Inputs with their targets, as they are stored. The arrays may be memory-mapped files.

    Stored inputs may also be several arrays or the items of a data set (`stored_inputs.py`), cast to Tensor.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise KeelError(
                f"data must have one label per input (got {len(self.inputs)} inputs and {len(self.targets)} labels)"
            )
        if len(self.inputs) == 0:
            raise KeelError("data must have at least one example (got 0)")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, indices: np.ndarray | Tensor) -> "Examples":
        """Gather some examples: floats become float32, and integer targets int64, which the losses require."""
        indices = torch.tensor(indices) if isinstance(indices, np.ndarray) else indices
        if isinstance(self.inputs, Items):
            inputs, targets = self.inputs.gather(indices.tolist())
        else:
            inputs = self.inputs.index_select(0, indices)  # several times as fast as [indices]
            targets = self.targets.index_select(0, indices)
        return Examples(
            inputs.float() if inputs.is_floating_point() else inputs,
            targets.float() if targets.is_floating_point() else targets.long(),
        )

    def subset(self, indices: np.ndarray) -> "Examples":
        """Return some of the examples, as they are stored."""
        if isinstance(self.inputs, Tensor):
            return self[indices]
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return Examples(self.inputs.subset(rows), self.targets.index_select(0, rows))

    @property
    def packing(self) -> Packing | None:
        """How several inputs are packed into one; None for models that take one input."""
        return getattr(self.inputs, "packing", None)

    @property
    def variable(self) -> bool:
        """Whether the length of inputs or targets differs from minibatch to minibatch."""
        return getattr(self.inputs, "variable", False)

    def fingerprint(self) -> str:
        """Return the SHA-256 of all inputs and targets; of some, where reading all would take long."""
        content = sha256()
        for tensor in (self.inputs, self.targets):
            if isinstance(tensor, Tensor):
                for part in byte_parts(tensor):
                    content.update(part)
            else:
                content.update(tensor.fingerprint().encode())
        return content.hexdigest()


@dataclass(frozen=True)
class ClientExamples:
    """The examples of one client: rows of the shared examples, gathered only when they are used."""

    examples: Examples
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def variable(self) -> bool:
        """Whether the length of the inputs differs from minibatch to minibatch."""
        return self.examples.variable

    @property
    def elements_per_example(self) -> int:
        """The number of elements of one stored input."""
        return prod(self.examples.inputs.shape[1:])

    def __getitem__(self, indices: np.ndarray) -> Examples:
        return self.examples[self.rows[indices]]


@dataclass(frozen=True)
class Partition:
    """The assignment of examples to clients: client i has the examples indices[offsets[i]:offsets[i + 1]].

    There is no object per client. A large index table is kept in a temporary file (below TMPDIR) whose pages are
    released after each read, so that idle clients take no memory.
    """

    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        indices, offsets = _file_backed(_narrow(self.indices)), _narrow(self.offsets).view()
        for name, table in ("indices", indices), ("offsets", offsets):
            table.setflags(write=False)
            object.__setattr__(self, name, table)
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            raise KeelError(f"data: client {empty[0]} has no examples; every client needs at least one")

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """The number of examples of every client. It is computed on each access."""
        return np.diff(self.offsets)

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        """Return the number of examples of some clients."""
        return self.offsets[clients + 1] - self.offsets[clients]

    def __getitem__(self, client: int) -> np.ndarray:
        """Return the rows of one client's examples."""
        rows = self.indices[self.offsets[client] : self.offsets[client + 1]].copy()
        self._release_pages()
        return rows

    def fingerprint(self) -> str:
        """Return the SHA-256 of the assignment."""
        content = sha256()
        for table in (self.indices, self.offsets):
            content.update(np.ascontiguousarray(table).data)
        self._release_pages()
        return content.hexdigest()

    def _release_pages(self) -> None:
        """Return the pages that were read from a file-backed table to the system."""
        if isinstance(self.indices.base, mmap.mmap):
            self.indices.base.madvise(mmap.MADV_DONTNEED)

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> "Partition":
        """Build the partition in which client i has the rows parts[i]."""
        return cls(np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])]))


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Convert to 32 bits if the numbers fit: with a million clients the size of the tables matters."""
    fits = len(numbers) == 0 or numbers.max() <= np.iinfo(np.int32).max
    return numbers.astype(np.int32 if fits else np.int64, copy=False)


def _file_backed(table: np.ndarray) -> np.ndarray:
    """Move a large table to an unnamed temporary file; it stays in memory if the file cannot be written."""
    if table.nbytes < FILE_BACKED_FROM or sys.platform == "win32":  # Windows cannot release mapped pages
        return table.view()
    try:
        with TemporaryFile() as file:
            file.write(np.ascontiguousarray(table).data)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:  # the disk is full, or there is no folder for temporary files
        return table.view()
    return np.ndarray(table.shape, table.dtype, buffer=mapped)


@dataclass(frozen=True, repr=False)
class FederatedData:
    """Training examples partitioned over clients, and test examples. `classes` is 0 if targets are not labels."""

    name: str
    train: Examples
    test: Examples
    partition: Partition
    classes: int
    transform: Transform = field(default_factory=Identity)
    specials: tuple[int, ...] = ()
    sha256: str | None = None
    task: TaskKind | None = None
    """The kind of task; by default it is inferred from the targets."""
    test_clients: np.ndarray | None = None
    """The client of each test example, if the test examples belong to clients."""
    class_names: tuple[str, ...] = ()
    """The name of each class; empty if the classes have no names."""
    client_names: np.ndarray | None = None
    """The natural key of each client; None if the clients have no names."""
    is_local: ClassVar[bool] = True
    """Whether the examples are on this machine."""

    def __repr__(self) -> str:
        return f"<FederatedData {self.name}: {self.partition.clients} clients, {self.partition.sizes.sum()} examples>"

    @property
    def kind(self) -> TaskKind:
        """The kind of task that the targets are for."""
        if self.task is not None:
            return self.task
        if not self.classes:
            return "regression"
        return "classification" if self.train.targets.dim() == 1 and not self.specials else "sequence"

    @property
    def outputs(self) -> int:
        """The number of outputs that a model needs: one per class, or one per element of a target."""
        return self.classes or max(1, prod(self.train.targets.shape[1:]))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one transformed input."""
        if self.train.variable:
            return tuple(self.train.inputs.shape[1:])
        return tuple(self.transform(self.train[np.arange(1)].inputs).shape[1:])

    @property
    def chunk_size(self) -> int:
        """The number of examples per forward pass where the batch size does not matter: few if an example is large."""
        positions = prod(self.train.targets.shape[1:])
        if self.train.variable:  # a sequence has about as many targets as inputs
            positions = max(positions, prod(self.input_shape))
        return max(1, min(512, 2**22 // max(1, prod(self.input_shape)), 2**24 // max(1, positions * self.classes)))

    def client_examples(self, client: int) -> ClientExamples:
        """Return a client's examples without gathering them."""
        return ClientExamples(self.train, self.partition[client])

    def client(self, client: int) -> Examples:
        """Gather all examples of a client."""
        return self.train[self.partition[client]]

    def trial_minibatch(self, size: int, offset: int = 0) -> Examples:
        """Return transformed examples to try a model on: as many as a minibatch has at most, from `offset` on."""
        rows = np.arange(offset, offset + min(size, int(self.partition.sizes.max())))
        batch = self.train[self.partition.indices[rows % len(self.partition.indices)]]
        return Examples(self.transform(batch.inputs), batch.targets)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the data set that was partitioned."""
        return self.sha256 or fingerprint(self.train, self.test)


class RemoteData(FederatedData):
    """Data that other machines hold, as the server knows them: the number of examples per client and their shape.

    The training example is a placeholder with the right shape, to which every index of the partition refers. The test
    examples are a placeholder too if the server has none.
    """

    is_local = False


def fingerprint(train: Examples, test: Examples) -> str:
    """Return the SHA-256 of all inputs and targets."""
    if not (isinstance(train.inputs, Tensor) and isinstance(test.inputs, Tensor)):
        return sha256((train.fingerprint() + test.fingerprint()).encode()).hexdigest()
    content = sha256()
    for tensor in (train.inputs, train.targets, test.inputs, test.targets):
        for part in byte_parts(tensor):
            content.update(part)
    return content.hexdigest()
