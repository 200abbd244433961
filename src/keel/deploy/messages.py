"""The format of messages between server and sites: tensors as raw bytes, with checks of everything a site sends.

Nothing that arrives is unpickled. The server checks the names, types, shapes and values of a reply before it uses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from keel.algorithms.base import Context, Message
from keel.core.client_state import Signature
from keel.deploy.invalid_reply import InvalidReply, one_line
from keel.deploy.reply_limit import MAX_TEXT
from keel.errors import KeelError, shown

RAW = "keel.raw"
"""Serialisation type of an array: its elements in little-endian order, without a header."""
TENSORS = "keel.tensors"
"""Record of a message with its tensors, in both directions."""
REQUEST = "keel.request"
"""Record with the parameters of a server's request. A reply repeats its run ID (`training`) and round."""
REPLY = "keel.reply"
"""Record with the numbers of a site's reply: steps, loss, a description of its data."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The types of tensors that a message may have."""
MAX_LOSS = 1e9
"""Largest mean loss that the server accepts: sums of more would overflow."""
MAX_FLOAT32 = torch.finfo(torch.float32).max
"""Largest number of a request: it becomes part of float32 arithmetic."""


def pack(tensors: Message) -> ArrayRecord:
    """Serialise tensors for a message."""
    return ArrayRecord({name: _to_array(tensor) for name, tensor in tensors.items()})


def _to_array(tensor: Tensor) -> Array:
    content = tensor.detach().cpu().contiguous()
    dtype = str(content.dtype).removeprefix("torch.")
    return Array(dtype, tuple(content.shape), RAW, content.reshape(-1).view(torch.uint8).numpy().tobytes())


def unpack_reply(content: RecordDict, expected: Signature, max_norm: float | None = None) -> Message:
    """Return the tensors of a site's reply after checking them.

    Raises:
        InvalidReply: A name, dtype, shape or size differs from `expected`, or a norm is not finite or above `max_norm`.
    """
    record = content.get(TENSORS, ArrayRecord())
    if not isinstance(record, ArrayRecord) or set(record) != set(expected):
        raise InvalidReply(f"has tensors {sorted(record)}; expected {sorted(expected)}")
    tensors = {name: _to_tensor(name, record[name], *expected[name]) for name in expected}
    check_norms(tensors, max_norm)
    return tensors


def check_norms(tensors: Message, max_norm: float | None) -> None:
    """Raise InvalidReply if the norm of a tensor is not finite or above `max_norm`."""
    for name, tensor in tensors.items():
        norm = float(torch.linalg.vector_norm(tensor.float()))
        if not isfinite(norm):
            raise InvalidReply(f"{name} or its norm is not finite")
        if max_norm is not None and norm > max_norm:
            raise InvalidReply(f"{name} has norm {norm:g}, above federation.max_norm = {max_norm:g}")


@dataclass(frozen=True)
class ReplyBounds:
    """What a reply may contain at most. A larger one is dropped as soon as it is pulled, before it is read."""

    tensors: int = 0
    tensor_bytes: int = 0

    @classmethod
    def of(cls, signature: Signature) -> "ReplyBounds":
        """Return the bounds of a reply with these tensors."""
        sizes = (prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in signature.values())
        return cls(len(signature), sum(sizes))

    def check(self, content: RecordDict) -> None:
        """Check the names and the sizes of all records.

        Raises:
            InvalidReply: There is a record that no reply of Keel has, or a record is too large.
        """
        if unknown := sorted(set(content) - {TENSORS, REPLY, REQUEST}):
            raise InvalidReply(f"has the unknown record {one_line(unknown[0])!r}")
        arrays = [array for record in content.array_records.values() for array in record.values()]
        size = sum(len(array.data) for array in arrays)
        if len(arrays) > self.tensors or size > self.tensor_bytes:
            raise InvalidReply(
                f"oversize: has {len(arrays)} tensors with {size} bytes; expected {self.tensors} with "
                f"{self.tensor_bytes}"
            )
        texts = sum(
            _text_size(name) + _text_size(value)
            for records in (content.metric_records, content.config_records)
            for record in records.values()
            for name, value in record.items()
        ) + sum(
            _text_size([name, array.dtype, array.stype, *array.shape])
            for record in content.array_records.values()
            for name, array in record.items()
        )
        if texts > MAX_TEXT:
            raise InvalidReply(f"oversize: has {texts} bytes of numbers and texts; at most {MAX_TEXT} are accepted")


def _text_size(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return len(value) if isinstance(value, str | bytes) else 8


def unpack_request(content: RecordDict, expected: Signature | None = None) -> Message:
    """Return the tensors of a server's request.

    Args:
        expected: The tensors that the request may have. Without it, any names and shapes are accepted.

    Raises:
        KeelError: The request has no tensors, or one that is not expected or has a wrong size.
    """
    record = content.get(TENSORS)
    if not isinstance(record, ArrayRecord):
        raise KeelError(f"the request has no record {TENSORS!r}")
    tensors: Message = {}
    for name, array in record.items():
        if expected is not None and name not in expected:
            raise KeelError(f"the request has the unknown tensor {shown(name)}")
        shape, dtype = (list(array.shape), array.dtype) if expected is None else expected[name]
        try:
            tensors[name] = _to_tensor(name, array, shape, dtype)
        except InvalidReply as error:
            raise KeelError(f"the request is invalid: {error}") from None
    return tensors


def _to_tensor(name: str, array: Array, shape: list[int], dtype_name: str) -> Tensor:
    if array.stype != RAW or array.dtype != dtype_name:
        raise InvalidReply(
            f"{name} has dtype {array.dtype} and serialisation {array.stype}; expected {dtype_name} and {RAW}"
        )
    if list(array.shape) != list(shape):
        raise InvalidReply(f"{name} has shape {list(array.shape)}; expected {list(shape)}")
    dtype = getattr(torch, dtype_name) if dtype_name in DTYPES else None
    if dtype is None or any(type(size) is not int or size < 0 for size in shape):
        raise InvalidReply(f"{name} has dtype {dtype_name} and shape {shape}, which no tensor of Keel has")
    if len(array.data) != (expected_bytes := prod(shape) * dtype.itemsize):
        raise InvalidReply(f"{name} has {len(array.data)} bytes; its shape requires {expected_bytes}")
    if not array.data:
        return torch.empty(shape, dtype=dtype)
    # Cloned: the alignment of a tensor changes the rounding of what is computed from it, and messages are unaligned.
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(shape).clone()


def tensor_bytes(content: RecordDict) -> int:
    """Return the number of bytes of all tensors in a message, as sent."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def request_of(ctx: Context) -> dict[str, Any]:
    """Return the parameters of a request that describe the round. A site knows the sizes of its model itself."""
    return {name: value for name, value in vars(ctx).items() if name != "sizes"}


def round_context(request: Mapping[str, Any], sizes: Sequence[int]) -> Context:
    """Return the round's context from the parameters of a request.

    Args:
        sizes: The number of elements of each of the model's parameter tensors.
    """
    names = [name for name in Context.__dataclass_fields__ if name != "sizes"]
    for name in names:
        value = request.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT32:
            raise KeelError(f"{name} of the request must be a finite number (got {shown(value)})")
    return Context(**{name: request[name] for name in names}, sizes=tuple(sizes))


def reply_numbers(content: RecordDict, round: int, training: str) -> MetricRecord:
    """Return the numbers of a reply.

    Raises:
        InvalidReply: The reply has none, or belongs to another round or run.
    """
    numbers, request = content.get(REPLY), content.get(REQUEST)
    if not isinstance(numbers, MetricRecord) or not isinstance(request, ConfigRecord):
        raise InvalidReply("has no numbers")
    if request.get("training") != training:
        raise InvalidReply("belongs to another run")
    if request.get("round") != round:
        raise InvalidReply(f"stale: belongs to round {request.get('round')!r}")
    return numbers


def read_loss(numbers: MetricRecord, count: int, non_negative: bool) -> float:
    """Return the loss of a reply: a mean, or a sum over `count` targets.

    Args:
        non_negative: Whether the loss cannot be negative, as cross entropy.
    """
    loss = read_finite(numbers, "loss")
    if loss < 0 and non_negative:
        raise InvalidReply(f"loss is {loss:g}, but cross entropy is never negative")
    if abs(loss) > MAX_LOSS * max(count, 1):
        raise InvalidReply(f"loss is {loss:g}, above {MAX_LOSS:g} per example")
    return loss


def read_integer(numbers: MetricRecord, name: str, minimum: int = 0) -> int:
    value = numbers.get(name)
    if type(value) is not int or value < minimum:
        raise InvalidReply(f"{name} must be an integer from {minimum} (got {value!r})")
    return value


def read_finite(numbers: MetricRecord, name: str) -> float:
    value = numbers.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InvalidReply(f"{name} must be a finite number (got {value!r})")
    return float(value)
