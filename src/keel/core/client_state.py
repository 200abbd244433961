"""The clients' states between their rounds, as rows of a file: RAM does not grow with the number of clients.

A row that the last checkpoint or the current round needs is never overwritten: a client's new state goes to another
row. So a round reads and writes one client's state at a time, an interrupted round changes nothing, a checkpoint costs
only what has changed, and after a kill the rows of the last two checkpoints are intact. Every row has a checksum, which
is checked whenever the row is read.
"""

import json
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile, mkstemp
from weakref import finalize
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import ClientState, State
from keel.core.choices import Precision
from keel.errors import DamagedFile, KeelError

RESERVED = "keel."
"""Begins the names in a client state that no algorithm may use."""
OPTIMIZER = "keel.optimizer."
"""Begins the names of a client's optimiser state."""
Signature = dict[str, tuple[list[int], str]]
"""The names of tensors with their shapes and dtypes."""


@dataclass(frozen=True)
class SavedRows:
    """What a checkpoint keeps of the client states besides the file."""

    arrays: dict[str, np.ndarray]
    """The clients, their rows and the checksums of these. Checkpoints of earlier versions have no checksums."""
    signature: str


class ClientStates(Mapping[int, ClientState]):
    """Client number to client state, ordered by when each client last took part.

    Args:
        path: The file; without one, a temporary file that is deleted with this object.
        precision: The dtype in which float32 tensors as long as the model are stored. Other tensors are stored as
            they are: half precision would destroy a counter.
        keep: How many states are kept at most. A client whose state was evicted starts again as a new one.
        parameters: The number of elements of the model.
    """

    def __init__(
        self,
        path: Path | None = None,
        precision: Precision = "float32",
        keep: int | None = None,
        parameters: int | None = None,
    ):
        self.precision, self.keep, self.parameters = precision, keep, parameters
        self.path, self.file = path, _open(path)
        finalize(self, os.close, self.file)
        self.rows: OrderedDict[int, int] = OrderedDict()
        self.signature: Signature | None = None
        self._staged: dict[int, int] = {}
        self._sums = array("I")
        self._last, self._kept = np.empty(0, np.int64), np.empty(0, np.bool_)
        self._free: list[int] = []
        self._end = 0

    def __getitem__(self, client: int) -> ClientState:
        row = self.rows[client]
        signature = self.signature or {}
        buffers = [bytearray(prod(shape) * _itemsize(dtype)) for shape, dtype in signature.values()]
        _read(self.file, buffers, row * self.row_bytes)
        if _sum(buffers) != self._sums[row]:
            raise self._damaged(f"the checksum of client {client} is wrong")
        state = {}
        for buffer, (name, (shape, dtype)) in zip(buffers, signature.items(), strict=True):
            state[name] = torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape)
        return restored(state, self.precision, self.parameters)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.signature or {})

    def stage(self, client: int, state: ClientState) -> None:
        """Write a client's new state; until `commit` the client has its old one."""
        tensors = stored(state, self.precision, self.parameters)
        signature = signature_of(tensors)
        if self.signature is None:
            self.signature = signature
        elif signature != self.signature:
            raise KeelError(
                f"client state must have the same names, shapes and dtypes for every client and round (got "
                f"{_text(signature)}, before {_text(self.signature)}); change the algorithm's report()"
            )
        row = self._next_row()
        self._staged[client] = row
        contents = [_raw(tensor) for tensor in tensors.values()]
        self._sums[row] = _sum(contents)
        _write(self.file, contents, row * self.row_bytes)

    def commit(self) -> None:
        """End the round: the staged states are now the clients' states."""
        staged, self._staged = self._staged, {}  # first, so that an interrupt cannot have them freed as well
        for client, row in staged.items():
            self._release(self.rows.pop(client, None))
            self.rows[client] = row
        while self.keep is not None and len(self.rows) > self.keep:
            self._release(self.rows.popitem(last=False)[1])

    def discard(self) -> None:
        """Drop the states that an interrupted round staged."""
        self._free += self._staged.values()
        self._staged = {}

    def save(self) -> SavedRows:
        """What a checkpoint needs, once the rows are on disk. Call `saved` when the checkpoint is written."""
        os.fsync(self.file)
        clients, rows = (np.fromiter(values, np.int64, len(self.rows)) for values in (self.rows, self.rows.values()))
        sums = np.array(self._sums, np.uint32)[rows].view(np.int32)
        return SavedRows({"clients": clients, "rows": rows, "sums": sums}, json.dumps(self.signature))

    def saved(self) -> None:
        """The checkpoint is written: rows that neither it nor the one before it needs are free.

        Not to be called within a round.
        """
        self._staged = {}
        before, self._last = self._last, np.fromiter(self.rows.values(), np.int64, len(self.rows))
        self._keep(self._last, before)

    def restore(self, saved: SavedRows) -> None:
        """Restore what `save` returned."""
        parsed = json.loads(saved.signature)
        self.signature = None if parsed is None else {name: (shape, dtype) for name, (shape, dtype) in parsed.items()}
        rows = saved.arrays["rows"]
        self.rows = OrderedDict(zip(saved.arrays["clients"].tolist(), rows.tolist(), strict=True))
        self._end = 1 + int(rows.max(initial=-1))
        if os.fstat(self.file).st_size < self._end * self.row_bytes:
            raise self._damaged("it is shorter than its checkpoint requires")
        sums = np.zeros(self._end, np.uint32)
        if "sums" in saved.arrays:
            sums[rows] = saved.arrays["sums"].view(np.uint32)
        else:
            sums[rows] = [sum for _, sum in self._read_sums()]
        self._sums = array("I", sums.tobytes())
        self._last = rows
        self._keep(rows)

    def protect(self, saved: SavedRows) -> None:
        """Keep the rows of the checkpoint before the one that was restored."""
        rows = saved.arrays["rows"]
        self._end = max(self._end, 1 + int(rows.max(initial=-1)))
        self._keep(self._last, rows)

    def verify(self) -> None:
        """Read the state of every client.

        Raises:
            DamagedFile: A state does not have its checksum.
        """
        for client, sum in self._read_sums():
            if sum != self._sums[self.rows[client]]:
                raise self._damaged(f"the checksum of client {client} is wrong")

    def _read_sums(self) -> Iterator[tuple[int, int]]:
        """The checksum of each client's row in the file."""
        buffers = [bytearray(self.row_bytes)]
        for client, row in self.rows.items():
            _read(self.file, buffers, row * self.row_bytes)
            yield client, _sum(buffers)

    def _damaged(self, reason: str) -> DamagedFile:
        return DamagedFile(f"run: {str(self.path)!r} is damaged ({reason}); keel repair restores the run if it can")

    def _keep(self, *needed: np.ndarray) -> None:
        """Keep these rows; all others are free."""
        self._kept = np.zeros(self._end, np.bool_)
        for rows in needed:
            self._kept[rows] = True
        self._sums.extend([0] * (self._end - len(self._sums)))
        self._free = np.flatnonzero(~self._kept).tolist()

    def _release(self, row: int | None) -> None:
        if row is not None and not (row < len(self._kept) and self._kept[row]):
            self._free.append(row)

    def _next_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        self._sums.append(0)
        return self._end - 1


def algorithm_state(state: ClientState) -> ClientState:
    """The client state as the algorithm gave it, without what the optimiser and the mechanisms keep."""
    return {name: value for name, value in state.items() if not name.startswith(RESERVED)}


def stored(state: ClientState, precision: Precision, parameters: int | None) -> ClientState:
    """The state as it is stored: with half precision, float32 tensors as long as the model are cast to it.

    Tensors of the local optimiser are not cast to float16, in which the squares of small gradients would become 0.
    """
    dtype = getattr(torch, precision)

    def is_cast(name: str, value: Tensor) -> bool:
        narrow = precision == "float16" and name.startswith(OPTIMIZER)
        return value.dtype == torch.float32 and value.numel() == parameters and not narrow

    return {name: value.to(dtype) if is_cast(name, value) else value for name, value in state.items()}


def restored(state: ClientState, precision: Precision, parameters: int | None) -> ClientState:
    """The inverse of `stored`."""
    dtype = getattr(torch, precision)
    return {
        name: value.float() if value.dtype == dtype and value.numel() == parameters else value
        for name, value in state.items()
    }


def within_budget(server: State, before: State, limit: float, states_file: Path | None) -> State:
    """The server state; beyond `limit` bytes, tensors that a round left unchanged go to files next to `states_file`."""
    if sum(tensor.numel() * tensor.element_size() for tensor in server.values()) <= limit:
        return server
    unchanged = {id(tensor) for tensor in before.values()}
    folder = None if states_file is None else states_file.parent
    return {name: to_mapped_file(value, folder) if id(value) in unchanged else value for name, value in server.items()}


def to_mapped_file(tensor: Tensor, folder: Path | None) -> Tensor:
    """The tensor in a memory-mapped file, which is removed with the tensor. One that is mapped already stays."""
    if tensor.untyped_storage().filename is not None:
        return tensor
    with NamedTemporaryFile(prefix=".keel-", dir=folder) as file:
        file.truncate(tensor.numel() * tensor.element_size())
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.copy_(tensor.reshape(-1)).view(tensor.shape)


def signature_of(tensors: Mapping[str, Tensor]) -> Signature:
    return {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def row_bytes(signature: Signature) -> int:
    return sum(prod(shape) * _itemsize(dtype) for shape, dtype in signature.values())


def _open(path: Path | None) -> int:
    if path is None:
        descriptor, name = mkstemp(prefix="keel-")
        Path(name).unlink()
        return descriptor
    new = not os.path.lexists(path)
    if not new and not path.is_file():  # a pipe cannot be sought, and a folder not be opened
        raise DamagedFile(
            f"run: {str(path)!r} is damaged (it is not a regular file); keel repair restores the run if it can"
        )
    if path.is_symlink():  # the file that it leads to is not this run's to change
        return os.open(path, os.O_RDONLY)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:  # to verify a run, or to read its model, no permission to write is needed
        return os.open(path, os.O_RDONLY)
    if new:  # the name is on disk before a checkpoint refers to it
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    return descriptor


def _read(file: int, buffers: list[bytearray], offset: int) -> None:
    """Fill the buffers."""
    views = [memoryview(buffer) for buffer in buffers]
    _transfer(os.preadv, file, views, offset, "the file of client states is shorter than it was")


def _write(file: int, contents: list[memoryview], offset: int) -> None:
    """Write all of the contents."""
    _transfer(os.pwritev, file, contents, offset, "client states could not be written; the disk may be full")


def _transfer(
    call: Callable[[int, list[memoryview], int], int], file: int, views: list[memoryview], offset: int, failure: str
) -> None:
    """Read or write all of the views. One call of the system transfers at most 2 GiB."""
    views = [view for view in views if len(view)]
    while views:
        count = call(file, views, offset)
        if count == 0:
            raise OSError(failure)
        offset += count
        views = _after(views, count)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _sum(contents: Iterable[bytes | bytearray | memoryview]) -> int:
    """The checksum of a row."""
    total = 0
    for content in contents:
        total = crc32(content, total)
    return total


def _text(signature: Signature) -> str:
    return ", ".join(f"{name} {dtype}{shape}" for name, (shape, dtype) in signature.items())


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
