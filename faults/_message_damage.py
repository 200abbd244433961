"""Random damage to the records of a message, and to the bytes that carry them."""

from contextlib import suppress
from math import inf, nan
from random import Random
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from faults._mutations import damaged

NUMBERS = (0, 1, -1, 2, 2**31, 2**62, -(2**63), 0.5, -0.5, 1e30, 1e308, -1e308, nan, inf, -inf)
TEXTS = ("", "0", "nan", "a\nb", "\0", "x" * 10_000, "é\u202e", "mine:run", "../../x", "[" * 2000, "a = 1", "a" * 64)
ODD: tuple[Any, ...] = (
    *NUMBERS, *TEXTS, b"", b"\xff", True, False, [], [1], [-1], ["a"], [nan], [2**62, 2**62], [1] * 100, [True],
    [b"x"], [1.5],
)  # fmt: skip
DTYPES = (
    "float32",
    "float64",
    "int64",
    "int32",
    "bool",
    "nn",
    "Tensor",
    "complex64",
    "qint8",
    "float8_e4m3fn",
    "",
    "bits8",
)
SHAPES = ((), (0,), (-1,), (39,), (1, 39), (2**62, 4), (10**9,), (1,) * 70, ("a",), (39.0,), (True,))
STYPES = ("keel.raw", "numpy.ndarray", "pickle", "")


def damaged_content(rng: Random, content: RecordDict) -> RecordDict:
    """Return damaged records, of values that Flower can send. It raises what Flower raises for damaged bytes."""
    if rng.random() < 0.4:
        sent = recorddict_to_proto(content).SerializeToString()
        return recorddict_from_proto(ProtoRecordDict.FromString(damaged(rng, sent)))
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(rng, content)
    return content


def _change(rng: Random, content: RecordDict) -> None:
    if not content:
        return
    name = rng.choice(sorted(content))
    record = content[name]
    kind = rng.randrange(12)
    if kind == 0:
        del content[name]
    elif kind == 1:
        content[rng.choice(TEXTS)] = content.pop(name)
    elif kind == 2:
        content[name] = rng.choice((ArrayRecord(), MetricRecord(), ConfigRecord()))
    elif isinstance(record, ArrayRecord):
        _change_arrays(rng, record)
    else:
        _change_values(rng, record)


def _change_values(rng: Random, record: MetricRecord | ConfigRecord) -> None:
    name = rng.choice([*record, "extra"])
    value: Any = record.get(name)
    if rng.random() < 0.1:
        record.pop(name, None)
        return
    if isinstance(value, str) and rng.random() < 0.6:
        value = damaged(rng, value.encode()).decode(errors="replace")
    elif isinstance(value, list) and value and rng.random() < 0.5:
        value = value * rng.choice((2, 1000))
    else:
        value = rng.choice(ODD)
    with suppress(TypeError, ValueError):  # Flower cannot send it
        record[name] = value


def _change_arrays(rng: Random, record: ArrayRecord) -> None:
    name = rng.choice([*record, "extra"])
    array = record.get(name) or Array("float32", (1,), "keel.raw", bytes(4))
    dtype, shape, stype, data = array.dtype, array.shape, array.stype, array.data
    kind = rng.randrange(7)
    if kind == 0:
        record.pop(name, None)
        return
    if kind == 1:
        dtype = rng.choice(DTYPES)
    elif kind == 2:
        shape = rng.choice(SHAPES)  # type: ignore[assignment]
    elif kind == 3:
        stype = rng.choice(STYPES)
    elif kind == 4:
        data = damaged(rng, data)
    elif kind == 5:
        at = 4 * rng.randrange(1 + len(data) // 4)
        data = data[:at] + rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f")) + data[at + 4 :]
    else:
        name = rng.choice(TEXTS)
    record[name] = Array(dtype, shape, stype, data)
