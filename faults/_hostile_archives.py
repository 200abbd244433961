"""Hostile weights, pickles, app bundles and archives."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import warnings
import zipfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from faults._outside import OUTSIDE, Evil


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@cache
def hostile_weights() -> list[bytes]:
    warnings.simplefilter("ignore")  # sparse and quantised tensors
    weight, bias = torch.ones(2, 3), torch.ones(2)
    stored = {"weight": weight, "bias": bias}
    bomb = io.BytesIO()
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
        zipfile.ZipFile(io.BytesIO(saved(stored))) as source,
    ):
        for name in source.namelist():
            archive.writestr(name, source.read(name) if "data/" not in name else bytes(2**20))
    odd: list[Any] = [
        {"weight": torch.ones(1).expand(10**6, 10**6), "bias": bias}, {"weight": weight.to_sparse(), "bias": bias},
        {"weight": weight * float("nan"), "bias": bias}, {"weight": weight.to(torch.complex64), "bias": bias},
        {"weight": weight.to(torch.float8_e4m3fn), "bias": bias}, {"weight": weight.to("meta"), "bias": bias},
        {"weight": weight.double() * 1e300, "bias": bias},
        {"weight": weight.to(torch.bool), "bias": bias}, {"weight": weight, "bias": [1.0, 2.0]}, {"a\nb": weight},
        {1: weight, "bias": bias}, [weight, bias],
        weight, 5, None, {}, {"weight": weight.to_sparse_csr(), "bias": bias}, {"weight": torch.ones(1).expand(2, 3),
        "bias": bias},
        {**stored, "more": torch.ones(1).expand(10**6, 10**6)}, {**stored, "more": torch.quantize_per_tensor(bias,
        1.0, 0, torch.qint8)},
    ]  # fmt: skip
    return [*map(saved, odd), bomb.getvalue(), pickle.dumps(Evil()), pickle.dumps({"weight": Evil()}), saved_evil()]


def saved_evil() -> bytes:
    return saved({"weight": Evil(), "bias": torch.ones(2)})


def weights(rng: Random, folder: Path) -> None:
    (folder / rng.choice(("model.pt", "old.pt", "model.safetensors"))).write_bytes(rng.choice(hostile_weights()))


def odd_safetensors(rng: Random, folder: Path) -> None:
    entry = {"dtype": rng.choice(("F32", "F64", "I8", "F4", "F8_E4M3", "C64", "X", "BOOL")), "shape": rng.choice(([2,
    3], [10**18], [-1], [0, 3], [2.5])),
             "data_offsets": rng.choice(([0, 24], [0, 10**18], [24, 0], [5, 5], [-1, 3]))}  # fmt: skip
    text = json.dumps({"weight": entry, "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}}).encode()
    size = rng.choice((len(text), 2**40, 2**63, 0, 2**27))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + bytes(32))


BATCHES = (
    pickle.dumps(Evil()), pickle.dumps({"data": Evil(), "labels": [1]}, protocol=0), pickle.dumps([1]),
    b"(" * 1000 + b".",
    pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1]}), b"\x80\x02" + b"]" * 1000 + b".",
    b"\x80\x04\x8e\x00\x00\x00\x00\x10\x00\x00\x00.", b"\x80\x02}q\x01(U\x04dataK\x01U\x06labels]q\x02K\x01au.",
    b"I" + b"9" * 5000 + b"\n.",
)  # fmt: skip


@cache
def gzip_bomb() -> bytes:
    return gzip.compress(b"\0\0\x08\x01\x06\x00\x00\x00" + bytes(8 << 20), mtime=0)


def bomb(rng: Random, folder: Path) -> None:
    (folder / "images.gz").write_bytes(gzip_bomb())


@cache
def hostile_bundles() -> list[bytes]:
    def zipped(name: str, content: bytes, method: int = zipfile.ZIP_DEFLATED, claimed: int | None = None) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            archive.writestr(name, content)
        raw, size = file.getvalue(), struct.pack("<I", len(content))
        return raw if claimed is None else raw.replace(size, struct.pack("<I", claimed))

    names = ("../x", "/x", "a/../../x", "a\\..\\x", "C:x", "a\nb", "a/", "./x", "\u202e", "x" * 60_000)
    methods = (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    bundles = [zipped(name, b"x") for name in names] + [zipped("x", bytes(9000), method) for method in methods]
    return [
        *bundles,
        zipped("x", bytes(9000), claimed=2**29),
        zipped("x", bytes(9000), claimed=10),
        zipped("x", b"abc", claimed=2**31),
    ]


def bundle(rng: Random, folder: Path) -> None:
    content = bytearray(rng.choice(hostile_bundles()))
    for _ in range(rng.randrange(3)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    (folder / "app.fab").write_bytes(content)


def archive(rng: Random, folder: Path) -> None:
    """Members that are links, devices or outside of the folder, with the names of the members to extract."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        for name in ("set", "set/train", "../../escape", f"{OUTSIDE}/written", "set/test", "set/train"):
            member = tarfile.TarInfo(name)
            member.type = rng.choice((tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE,
            tarfile.DIRTYPE, tarfile.CHRTYPE))  # fmt: skip
            member.linkname = rng.choice((str(OUTSIDE), str(OUTSIDE / "secret.txt"), "set/test", "..", name))
            packed.addfile(member)
    (folder / "set.tar.gz").write_bytes(file.getvalue())


CONTENTS = (b"{}", b"[]", b"null", b'{"sha256": [], "facts": {}}', b'{"sha256": {"../../x": "0"}, "facts": {}}',
b'{"sha256": {}, "facts": {}}',
            b'{"sha256": {"train": null}, "stamps": {}}',
            b'{"sha256": {}, "facts": {"words": 12}, "stamps": {}}')  # fmt: skip
