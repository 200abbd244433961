"""Hostile .npy files, tables and JSON."""

import io
import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from faults._outside import Evil
from faults._small_files import npy


def header(shape: str, dtype: str) -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(32)


SHAPES = ("(10**18,)", "(1000000000000000000,)", "(4294967296, 4294967296)", "(4, 1000000000)", "(-1,)", "(4, -2)",
"()",
          "(0,)", "(4, 0)", f"({'1, ' * 70})", "(True, 4)", "(4.0,)", "4", "'4'", "(99999999999999999999999,)",
          "None")  # fmt: skip
DTYPES = ("'<f4'", "'|O'", "'<U1000000000'", "'<M8[ns]'", "'<c16'", "'|V8'", "[('a', '<f4')]", "'<f2'", "'>f8'",
"'<f16'",
          "'|S0'", "[('a', '<f4', (1000000000,))]", "'<u8'", "4", "None", "[]", "'x'", "('<f4', (2,))",
          "'|b1'")  # fmt: skip


def hostile_header(rng: Random, folder: Path) -> None:
    (folder / "array.npy").write_bytes(header(rng.choice(SHAPES), rng.choice(DTYPES)))


def odd_array(rng: Random, folder: Path) -> None:
    (folder / "array.npy").write_bytes(rng.choice(odd_arrays()))


@cache
def odd_arrays() -> list[bytes]:
    four = np.arange(4)
    objects = io.BytesIO()
    np.save(objects, np.array([Evil()], dtype=object), allow_pickle=True)
    values = [
        *(four.astype(kind) for kind in ("f2", ">f8", "longdouble", "c8", "M8[s]", "m8[s]", "u8", "i1", "S2", "U2",
        "V4")),
        *(np.array([first, 1, 0, 2]) for first in (np.nan, np.inf, -1.0, 1e300, 0.5, -1, 2**40, 2**63)),
        *(four.reshape(shape) for shape in ((4, 1), (2, 2), (1, 4), (4, 1, 1, 1))),
        np.zeros((4, 0)), np.zeros(0), np.zeros((0, 3)), np.array(5), np.array("x"), np.array([True, False] * 2),
        np.asfortranarray(np.ones((4, 3))), np.array(["a", "", "a\0", "\ud7ff"]), np.array([np.nan] * 4), -four,
        four * 1e39,
        np.array([(1, 2.0)] * 4, dtype=[("a", "i4"), ("b", "f4")]), np.full(4, np.datetime64("NaT")), four + 2.0**53,
    ]  # fmt: skip
    return [npy(array) for array in values] + [objects.getvalue()]


HEAD = b"client,age,label\n"
TABLES = (
    HEAD, HEAD * 2, b"client,label\n" + b"a,1\n" * 9, HEAD + b"a,1,2\n" * 4, HEAD + b"a,nan,2\n" * 9,
    HEAD + b"a,1,nan\n" * 9,
    HEAD + b"a,1,-3\n" * 9, HEAD + b"a,1," + b"9" * 5000 + b"\n" + b"a,1,2\n" * 9, HEAD + b"a,1,1e400\n" * 9,
    HEAD + b"a," + b"9" * 5000 + b",1\n" + b"a,1,2\n" * 9, HEAD + b"a,1_0,2\n" * 9,
    "client,age,label\na,１,２\n".encode() * 9,
    (HEAD + b"a,1,2\n" * 9).decode().encode("utf-16"), HEAD + b"a\0,1,2\n" * 9,
    HEAD + b'"a,1,2\n' * 9, HEAD + b"a,1,\xff\n" * 9,
    HEAD + b"a" * 130_000 + b",1,2\n" + b"b,1,2\n" * 9000,
    HEAD + b"a,1," + b"x" * 130_000 + b"\n" + b"b,1,2\n" * 9000,
    HEAD + b"a" * 200_000 + b",1,2\n" * 9, b"client,client,label\n" + b"a,b,1\n" * 9, HEAD + b"a,1,2\r" * 9,
    b"\n" * 99,
    HEAD + b"a,1,99999999\n" * 9, HEAD + b"a,1e39,1\n" * 9, HEAD + b",1,2\n" * 9, b"client" + b",x" * 99_999 + b"\n",
)  # fmt: skip


def odd_parquet(rng: Random, folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    odd = (
        [None] * 9, ["x"] * 9, [[1, 2]] * 9, [{"a": 1}] * 9, [b"\xff"] * 9, [float("nan")] * 9,
        pyarrow.array([2**63] * 9, pyarrow.uint64()), [True, None] * 4 + [True],
        pyarrow.array(["a"] * 9).dictionary_encode(), pyarrow.array([0] * 9, pyarrow.timestamp("ns")), [-1] * 9,
        [], ["a" * 100_000] + ["b"] * 8, pyarrow.array([0] * 9, pyarrow.duration("s")), pyarrow.nulls(9),
    )  # fmt: skip
    columns: dict[str, Any] = {"client": ["a"] * 9, "age": list(range(9)), "label": [0, 1, 2] * 3}
    columns[rng.choice(list(columns))] = rng.choice(odd)
    lengths = {len(column) for column in columns.values()}
    columns = columns if len(lengths) == 1 else {name: [] for name in columns}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")


def json_of(x: Any, y: Any) -> bytes:
    return json.dumps({"users": ["u"], "user_data": {"u": {"x": x, "y": y}}}).encode()


GREY = [0.0] * 784
JSONS = (
    json_of([[10**400] * 784], [1]), json_of([[float("nan")] * 784], [1]), json_of([[float("inf")] * 784], [1]),
    json_of([], []),
    json_of([GREY], [10**30]), json_of([GREY], [1.0]), json_of([GREY], [True]), json_of([GREY], ["a"]),
    json_of([GREY], [[1]]),
    json_of([GREY], [-1]), json_of([GREY[:5], GREY], [1, 2]), json_of({"a": 1}, [1]), json_of("ab", "cd"),
    json_of([None], [None]),
    json_of([[[0.0] * 784]], [1]), json_of(["x" * 80], ["\ud800"]), json_of(["x" * 80], ["y"]),
    json_of([["x"] * 784], [1]),
    b'{"user_data": {"u": ' + b"[" * 100_000, b'{"user_data": []}', b"[]", b"{}", b'{"user_data": {}}', b"\xff", b"",
    b'{"user_data": {"u": {"x": [' + b"9" * 5000 + b'], "y": [1]}}}', json.dumps({"user_data": {"\ud800": {"x": [],
    "y": []}}}).encode(),
    json_of([["0.5"] * 784], [1]), json_of([[0.5] * 784], [1]), json_of([[1e-320] * 784], [1]),
    json_of([[True] * 784], [2**64]),
)  # fmt: skip
LINES = (
    b'{"user": 1, "text": "' + b"a " * 99_999 + b'"}', b'{"user": true, "text": "a. b. c. d. e. f."}',
    b'{"user": "\\ud800", "text": "\\ud800a"}',
    b'{"user": null, "text": "a"}', b'{"user": "a", "text": 5}', b"[" * 100_000,
    b'"' * 9, b'{"user": ' + b"9" * 5000 + b', "text": "a"}',
    '{"user": "a", "text": "b"}'.encode("utf-16"), b'{"user": "a", "text": "\\u0000. \\u2028. b"}', b"5", b"null",
    b"\xff\xfe", b"\n\n",
)  # fmt: skip
