"""The actor of the engine `ray`, and how a workload and its tensors travel to it."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Message
from keel.core.client import ClientResult
from keel.core.devices import find_device
from keel.core.engine import RoundWork, Workload
from keel.core.examples import Examples
from keel.core.versions import versions
from keel.data.store import file_of
from keel.engines.allocator import tune
from keel.engines.cohort import Cohort
from keel.engines.ray_cluster import load_ray, node_address
from keel.engines.serial import Serial
from keel.errors import KeelError

Arrays = dict[str, Any]
"""Tensors as NumPy arrays, which Ray puts into memory that the processes of a node share."""
Reference = list[Any]
"""A Ray object reference in a list: Ray would fetch a bare argument at every call, the actor fetches it once."""


@dataclass(frozen=True)
class FileArray:
    """An array in a file that other nodes may be able to open under the same path."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    def open(self) -> np.ndarray:
        array = np.load(self.path, mmap_mode="c", allow_pickle=False)
        if array.shape != self.shape or array.dtype.str != self.dtype:
            raise FileNotFoundError(self.path)
        return array


@dataclass(frozen=True)
class PackedWorkload:
    """A workload as it travels to a node, with its examples apart: as arrays, or as the files that hold them."""

    workload: Workload
    examples: tuple[np.ndarray | FileArray, ...]
    versions: dict[str, str]

    @classmethod
    def pack(cls, workload: Workload, by_file: bool) -> "PackedWorkload":
        task, data = workload.task, workload.task.data
        tensors = (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)
        if not all(
            isinstance(tensor, Tensor) for tensor in tensors
        ):  # several arrays, or items read when they are used
            return cls(workload, (), versions())
        placeholder = replace(data, train=data.train[np.arange(1)], test=data.test[np.arange(1)])
        examples = tuple(_file_or_array(tensor.numpy(), by_file) for tensor in tensors)
        return cls(replace(workload, task=replace(task, data=placeholder)), examples, versions())

    def unpack(self) -> Workload:
        """Return the workload.

        Raises:
            FileNotFoundError: This node cannot open a file of the examples.
        """
        if not self.examples:
            return self.workload
        arrays = [array.open() if isinstance(array, FileArray) else array for array in self.examples]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and nothing writes to it
            inputs, targets, *test = (torch.from_numpy(array) for array in arrays)
        data = replace(self.workload.task.data, train=Examples(inputs, targets), test=Examples(*test))
        return replace(self.workload, task=replace(self.workload.task, data=data))


class Trainer:
    """The actor: trains any group of clients with one core and one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        tune()
        self.fetched: tuple[Any, tuple[Any, Any]] | None = None

    def is_scheduled(self) -> None:
        """Return as soon as a node runs this actor, however long it takes to load."""

    def load(self, kind: type[Serial] | type[Cohort], reference: Reference) -> bool:
        """Build the engine. Return False if this node cannot open a file of the examples."""
        try:
            packed = load_ray().get(reference[0])
            workload = packed.unpack()
        except FileNotFoundError:
            return False
        installed = versions()
        for name, value in packed.versions.items():
            if installed[name] != value:
                raise KeelError(
                    f"engine.address: every node needs the same {name} as the driver "
                    f"(got {installed[name]!r} on {node_address()}, {value!r} on the driver)"
                )
        find_device(workload.device.type)
        self.engine = kind(workload)
        return True

    def train(self, reference: Reference, cohort: np.ndarray, states: list[Arrays], buffers: list[Any]) -> list[Any]:
        return [pack_result(result) for result in self.engine.train(self._work(reference, cohort, states, buffers))]

    def probe(self, reference: Reference, cohort: np.ndarray, states: list[Arrays], buffers: list[Any]) -> list[Arrays]:
        return [to_arrays(message) for message in self.engine.probe(self._work(reference, cohort, states, buffers))]

    def measure(self, reference: Reference, part: int) -> np.ndarray:
        theta, buffers = self._fetch(reference)
        self.engine.evaluator.load_weights(theta, buffers)
        return self.engine.evaluator.measure(part).numpy()

    def _work(self, reference: Reference, cohort: np.ndarray, states: list[Arrays], buffers: list[Any]) -> RoundWork:
        received, ctx = self._fetch(reference)
        return RoundWork(cohort, received, list(map(to_tensors, states)), ctx, list(map(to_tensor, buffers)))

    def _fetch(self, reference: Reference) -> tuple[Any, Any]:
        """Return what all items of a round share: (broadcast, context) or (theta, buffers). It is fetched once."""
        if self.fetched is None or self.fetched[0] != reference[0]:
            first, second = load_ray().get(reference[0])
            tensors = to_tensors(first) if isinstance(first, dict) else to_tensor(first)
            self.fetched = reference[0], (tensors, to_tensor(second) if isinstance(second, np.ndarray) else second)
        return self.fetched[1]


def _file_or_array(array: np.ndarray, by_file: bool) -> np.ndarray | FileArray:
    file = file_of(array) if by_file else None
    return array if file is None else FileArray(file, array.shape, array.dtype.str)


def pack_result(result: ClientResult) -> tuple[Any, ...]:
    buffers = to_array_or_none(result.buffers)
    return to_arrays(result.message), to_arrays(result.state), result.steps, float(result.loss), buffers


def unpack_result(packed: tuple[Any, ...]) -> ClientResult:
    message, state, steps, loss, buffers = packed
    return ClientResult(to_tensors(message), to_tensors(state), steps, torch.tensor(loss), to_tensor(buffers))


def to_arrays(tensors: Message) -> Arrays:
    return {name: to_array(value) for name, value in tensors.items()}


def to_array(tensor: Tensor) -> Any:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.detach().numpy()  # NumPy has no bfloat16


def to_array_or_none(tensor: Tensor | None) -> Any:
    return None if tensor is None else to_array(tensor)


def to_tensors(arrays: Arrays) -> ClientState:
    return {name: to_tensor(value) for name, value in arrays.items()}


def to_tensor(array: Any) -> Any:
    """Return a copy: Ray's memory is read-only, and stays allocated as long as an array refers to it."""
    return array if array is None or isinstance(array, Tensor) else torch.tensor(array)
