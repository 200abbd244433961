"""Hostile HDF5 files: links, data in other files, and shapes that are larger than the memory."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

from faults._outside import OUTSIDE
from faults._small_files import hdf5


def odd_hdf5(rng: Random, folder: Path) -> None:
    fill = rng.choice(HDF5)

    def filled(file: h5py.File) -> None:
        file.create_dataset("examples/00/tokens", data=["a b"], dtype=h5py.string_dtype())
        fill(file.create_group("examples/01"))

    (folder / "a.h5").write_bytes(hdf5(filled))


def _virtual(user: h5py.Group) -> None:
    layout = h5py.VirtualLayout((1,), dtype="S6")
    layout[:] = h5py.VirtualSource(str(OUTSIDE / "secret.h5"), "tokens", (1,))
    user.create_virtual_dataset("tokens", layout)


def _linked(link: Any) -> Callable[[h5py.Group], object]:
    return lambda user: user.__setitem__("tokens", link)


def _dataset(*args: Any, **kwargs: Any) -> Callable[[h5py.Group], object]:
    return lambda user: user.create_dataset("tokens", *args, **kwargs)


HDF5: tuple[Callable[[h5py.Group], object], ...] = (
    _linked(h5py.SoftLink("/examples/01/tokens")),
    _linked(h5py.SoftLink("/nowhere")),
    _linked(h5py.SoftLink("/examples")),
    _linked(h5py.ExternalLink(str(OUTSIDE / "secret.h5"), "/tokens")),
    lambda user: user.parent.__setitem__("02", h5py.ExternalLink(str(OUTSIDE / "secret.h5"), "/")),
    lambda user: user.parent.__setitem__("02", user.parent),
    _virtual,
    _dataset((4,), "S6", external=[(str(OUTSIDE / "secret.txt"), 0, 24)]),
    _dataset((10**12,), h5py.string_dtype(), chunks=(1000,)),
    _dataset((10**9,), "S100"),
    _dataset((10**8,), "S1", chunks=(10**8,), compression="gzip"),
    _dataset((3, 10**15), "i1", chunks=(1, 1)),
    _dataset(data=np.array([b"\xff\xfe"])),
    _dataset(data=[1, 2]),
    _dataset(data=b"scalar"),
    _dataset(data=h5py.Empty("S3")),
    _dataset(data=np.zeros(2, dtype=[("a", "i4")])),
    _dataset((2,), h5py.ref_dtype),
    _dataset((2,), h5py.vlen_dtype(np.int32)),
    _dataset(data=np.zeros((2, 2), "S3")),
    lambda user: user.create_group("tokens"),
    lambda user: None,
)
