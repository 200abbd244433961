"""Small valid contents of files, and the check of a data set that was read from some."""

import io
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import torch
from PIL import Image

from keel.data.dataset import Dataset
from keel.data.partition import partition_dataset
from keel.data.statistics import client_statistics

Files = dict[str, bytes]
"""The files of an input by path."""


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def picture(kind: str, grey: int = 90) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 9), (grey, 30, 200)).save(file, kind)
    return file.getvalue()


def hdf5(fill: Callable[[h5py.File], object]) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        fill(opened)
    return file.getvalue()


def checked(dataset: Dataset) -> None:
    """Check that a data set is valid, and partition it as a run does."""
    for part in dataset.train, dataset.test:
        assert len(part.inputs) == len(part.targets) > 0
        batch = part[np.arange(min(4, len(part)))]
        assert torch.isfinite(dataset.transform(batch.inputs).double()).all()
        if dataset.classes and dataset.task != "sequence":
            assert 0 <= int(part.targets.min()) <= int(part.targets.max()) < dataset.classes
    scheme = "iid" if dataset.keys is None else "key"
    client_statistics(partition_dataset("fuzzed", dataset, 0, scheme, clients=None if scheme == "key" else 2))
