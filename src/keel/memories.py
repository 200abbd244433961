"""What the clients remember between their rounds: rows of a file, so that RAM does not grow with those who took part.

A row that a checkpoint or the round at hand counts on is never written over: a client's new memory goes to another row.
So a round reads and writes one client's memory at a time, a round that is given up has changed nothing, a checkpoint
costs what has changed, and after a kill the rows it counts on are still there.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile, mkstemp
from typing import Any, Literal
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Memory
from keel.errors import KeelError

Precision = Literal["float32", "bfloat16", "float16"]
Form = dict[str, tuple[list[int], str]]
"""Names with shapes and types."""


class Memories(Mapping[int, Memory]):
    """Client to memory, in the order in which they took part last.

    Float tensors are kept in `precision`. With `keep`, only those of the clients seen last are: another one starts
    again as if it were new.
    """

    def __init__(self, path: Path | None = None, precision: Precision = "float32", keep: int | None = None):
        self.precision, self.keep = getattr(torch, precision), keep
        self.path, self.file = path, _opened(path)
        finalize(self, os.close, self.file)
        self.rows: OrderedDict[int, int] = OrderedDict()
        self.form: Form | None = None
        self._staged: dict[int, int] = {}
        self._saved: set[int] = set()
        self._free: list[int] = []
        self._end = 0

    def __getitem__(self, client: int) -> Memory:
        assert self.form is not None or client not in self.rows
        form = self.form or {}
        parts = [bytearray(prod(shape) * _bytes(kind)) for shape, kind in form.values()]
        os.preadv(self.file, parts, self.rows[client] * self.row_bytes)
        memory = {}
        for part, (name, (shape, kind)) in zip(parts, form.items(), strict=True):
            tensor = torch.frombuffer(part, dtype=getattr(torch, kind)).view(shape)
            memory[name] = tensor.float() if tensor.is_floating_point() else tensor
        return memory

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.form or {})

    def stage(self, client: int, memory: Memory) -> None:
        """Writes what a client will remember once the round is over: until `commit` it remembers what it did."""
        tensors = {
            name: value.to(self.precision) if value.is_floating_point() else value for name, value in memory.items()
        }
        form = form_of(tensors)
        if self.form is None:
            self.form = form
        elif form != self.form:
            raise KeelError(
                f"algorithm: what a client remembers changes its form (from {sorted(self.form)} to {sorted(form)}) "
                "or its shapes; accepted: the same names and shapes for every client and round"
            )
        row, size = self._row(), self.row_bytes
        self._staged[client] = row
        written = os.pwritev(self.file, [_raw(tensor) for tensor in tensors.values()], row * size)
        if written < size:
            raise OSError(f"only {written} of {size} bytes of a memory could be written; the disk may be full")

    def commit(self) -> None:
        """The round is over: what was staged is what those clients remember."""
        staged, self._staged = self._staged, {}  # first: what breaks in must not have it freed as well
        for client, row in staged.items():
            self._release(self.rows.pop(client, None))
            self.rows[client] = row
        while self.keep is not None and len(self.rows) > self.keep:
            self._release(self.rows.popitem(last=False)[1])

    def discard(self) -> None:
        """What was staged is forgotten, if anything was: its round was given up."""
        self._free += self._staged.values()
        self._staged = {}

    def save(self) -> dict[str, Any]:
        """What a checkpoint keeps of them, once the rows are on disk; `saved` is called when it has done so."""
        os.fsync(self.file)
        clients, rows = (np.fromiter(values, np.int64, len(self.rows)) for values in (self.rows, self.rows.values()))
        return {"clients": clients, "rows": rows, "form": json.dumps(self.form)}

    def saved(self) -> None:
        """The checkpoint stands: rows that it does not count on are free. Not within a round."""
        self._staged = {}
        self._saved = set(self.rows.values())
        self._free = [row for row in range(self._end) if row not in self._saved]

    def restore(self, clients: np.ndarray, rows: np.ndarray, form: str) -> None:
        """As a checkpoint left them."""
        self.form = (
            {name: (shape, kind) for name, (shape, kind) in json.loads(form).items()} if form != "null" else None
        )
        self.rows = OrderedDict(zip(clients.tolist(), rows.tolist(), strict=True))
        self._end = 1 + max(rows.tolist(), default=-1)
        if os.fstat(self.file).st_size < self._end * self.row_bytes:
            raise KeelError(f"run: {str(self.path)!r} is damaged: it is shorter than its checkpoint says")
        self.saved()

    def _release(self, row: int | None) -> None:
        if row is not None and row not in self._saved:
            self._free.append(row)

    def _row(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        return self._end - 1


def on_disk(tensor: Tensor, folder: Path | None) -> Tensor:
    """The tensor in a file that is mapped, and gone when the tensor is. One that lies there already stays."""
    if tensor.untyped_storage().filename is not None:
        return tensor
    with NamedTemporaryFile(prefix=".keel-", dir=folder) as file:
        file.truncate(tensor.numel() * tensor.element_size())
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.copy_(tensor.reshape(-1)).view(tensor.shape)


def form_of(memory: Memory) -> Form:
    return {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in memory.items()}


def row_bytes(form: Form) -> int:
    return sum(prod(shape) * _bytes(kind) for shape, kind in form.values())


def _opened(path: Path | None) -> int:
    """The file; without a path one that vanishes when it is closed."""
    if path is not None:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    number, name = mkstemp(prefix="keel-")
    Path(name).unlink()
    return number


def _bytes(kind: str) -> int:
    return getattr(torch, kind).itemsize


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
