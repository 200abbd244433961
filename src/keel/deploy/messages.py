"""What crosses the network: flat dicts of tensors as raw bytes, and what makes an answer one that can be used.

Nothing that a remote party sends is unpickled, and nothing of it is believed before its names, types, shapes and
values are found to be what was asked for.
"""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite, prod
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from keel.algorithms.base import Context, Message
from keel.memories import Form

RAW = "keel.raw"
"""The numbers one after the other, little-endian, with nothing around them: as many bytes as the tensor has."""
TENSORS, ASKED, TOLD = "keel.tensors", "keel.asked", "keel.told"
"""The records of a message: tensors either way, what the server asks and what a site tells besides."""


class Broken(ValueError):
    """An answer that cannot be used, and why."""


def pack(tensors: Message) -> ArrayRecord:
    return ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})


def _array(tensor: Tensor) -> Array:
    content = tensor.detach().cpu().contiguous()
    kind = str(content.dtype).removeprefix("torch.")
    return Array(kind, tuple(content.shape), RAW, content.reshape(-1).view(torch.uint8).numpy().tobytes())


def unpack(content: RecordDict, form: Form, largest: float | None = None) -> Message:
    """The tensors of an answer, which have to be of this form, and finite in their norm, which is up to `largest`."""
    record = content.get(TENSORS, ArrayRecord())
    if not isinstance(record, ArrayRecord) or set(record) != set(form):
        raise Broken(f"sends {sorted(record)} instead of {sorted(form)}")
    tensors = {name: _tensor(name, record[name], *form[name]) for name in form}
    for name, tensor in tensors.items():
        norm = float(torch.linalg.vector_norm(tensor.float()))
        if not isfinite(norm):
            raise Broken(f"{name} is not finite, or too large for its norm to be")
        if largest is not None and norm > largest:
            raise Broken(f"{name} has norm {norm:g}, above {largest:g} (federation.largest_norm)")
    return tensors


def received(content: RecordDict) -> Message:
    """The tensors that the server sent, whatever their form: a site does what its server's algorithm says."""
    record = content[TENSORS]
    assert isinstance(record, ArrayRecord)
    return {name: _tensor(name, array, list(array.shape), array.dtype) for name, array in record.items()}


def _tensor(name: str, array: Array, shape: list[int], kind: str) -> Tensor:
    if array.stype != RAW or array.dtype != kind:
        raise Broken(f"{name} is {array.dtype} ({array.stype}) instead of {kind}")
    if list(array.shape) != list(shape):
        raise Broken(f"{name} has shape {list(array.shape)} instead of {list(shape)}")
    dtype = getattr(torch, kind)
    if len(array.data) != prod(shape) * dtype.itemsize:
        raise Broken(f"{name} has {len(array.data)} bytes, which is not its shape's")
    # cloned: how a tensor lies in memory changes the bits of what is computed from it, and a message lies anywhere
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(shape).clone()


def size_of(content: RecordDict) -> int:
    """Bytes of the tensors in a message, as they were sent."""
    return sum(len(a.data) for record in content.array_records.values() for a in record.values())


def context_record(ctx: Context) -> ConfigRecord:
    return ConfigRecord(asdict(ctx))


def context_of(record: Mapping[str, Any]) -> Context:
    return Context(**{name: record[name] for name in Context.__dataclass_fields__})


def told(content: RecordDict, round: int, training: str) -> MetricRecord:
    """The numbers of an answer, which has to be of this round of this training."""
    record, asked = content.get(TOLD), content.get(ASKED)
    if not isinstance(record, MetricRecord) or not isinstance(asked, ConfigRecord):
        raise Broken("has no numbers")
    if asked.get("training") != training:
        raise Broken("is of another training")
    if asked.get("round") != round:
        raise Broken(f"stale: of round {asked.get('round')!r}")
    return record


def count(record: MetricRecord, name: str, least: int = 0) -> int:
    value = record.get(name)
    if type(value) is not int or value < least:
        raise Broken(f"{name} is {value!r} instead of a number from {least}")
    return value


def number(record: MetricRecord, name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise Broken(f"{name} is {value!r} instead of a finite number")
    return float(value)
