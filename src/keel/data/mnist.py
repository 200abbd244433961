"""MNIST by writer (LeCun et al., 1998; Yadav and Bottou, 2019): QMNIST's label files name the writer of each digit."""

import gzip
from pathlib import Path
from typing import Any
from zlib import error as ZlibError

import numpy as np
import torch

from keel.core.examples import Examples
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.fetch import Download
from keel.data.store import check, data_folder, prepared
from keel.data.transforms import Pixels
from keel.errors import KeelError

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
DOWNLOADS = (
    Download(
        f"{_MNIST}/train-images-idx3-ubyte.gz",
        "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "mnist/train-images-idx3-ubyte.gz",
    ),
    Download(
        f"{_MNIST}/train-labels-idx1-ubyte.gz",
        "md5:d53e105ee54ea40749a09fcbcd1e9432",
        "mnist/train-labels-idx1-ubyte.gz",
    ),
    Download(
        f"{_MNIST}/t10k-images-idx3-ubyte.gz",
        "md5:9fb629c4189551a2d022fa330f9573f3",
        "mnist/t10k-images-idx3-ubyte.gz",
    ),
    Download(
        f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
        "md5:ec29112dd5afa0611ce80d1b7f02629c",
        "mnist/t10k-labels-idx1-ubyte.gz",
    ),
    Download(
        f"{_QMNIST}/qmnist-train-labels-idx2-int.gz",
        "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
        "mnist/qmnist-train-labels-idx2-int.gz",
    ),
    Download(
        f"{_QMNIST}/qmnist-test-labels-idx2-int.gz",
        "md5:5b5b05890a5e13444e108efe57b788aa",
        "mnist/qmnist-test-labels-idx2-int.gz",
    ),
)
UNPACKED = {
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}
WRITER = 2
"""The column of QMNIST's labels that identifies the writer."""
_DTYPES: dict[int, str] = {8: ">u1", 12: ">i4"}


def mnist() -> Dataset:
    """70,000 handwritten digits of 28x28 pixels; 539 writers for training, 297 others for testing."""
    files = {Path(download.path).stem: existing(data_folder() / download.path) for download in DOWNLOADS}

    def make(folder: Path) -> dict[str, Any]:
        for download, file in zip(DOWNLOADS, files.values(), strict=True):
            check(file, download.digest if file.suffix == ".gz" else UNPACKED[file.name])
        for part, name, writers in ("train", "train", "train"), ("test", "t10k", "test"):
            images, labels, writer_table = (
                read_idx(files[file])
                for file in (
                    f"{name}-images-idx3-ubyte",
                    f"{name}-labels-idx1-ubyte",
                    f"qmnist-{writers}-labels-idx2-int",
                )
            )
            writer_table = writer_table[: len(labels)]  # QMNIST has more test digits; MNIST's come first
            if images.shape != (len(labels), 28, 28) or not np.array_equal(writer_table[:, 0], labels):
                raise KeelError(
                    f"data: the {part} files of MNIST and QMNIST have different labels; download them again"
                )
            np.save(folder / f"{part}_inputs.npy", images[:, None])
            np.save(folder / f"{part}_targets.npy", labels.astype(np.int64))
            if part == "train":
                np.save(folder / "keys.npy", writer_table[:, WRITER].astype(np.int64))
        return {}

    stored = prepared("mnist", list(files.values()), {}, make)
    tensors = {array: torch.from_numpy(values) for array, values in stored.arrays.items()}
    return Dataset(
        Examples(tensors["train_inputs"], tensors["train_targets"]),
        Examples(tensors["test_inputs"], tensors["test_targets"]),
        10,
        keys=stored.arrays["keys"],
        transform=Pixels((0.1307,), (0.3081,)),
        sha256=stored.sha256,
        class_names=tuple("0123456789"),
    )


ENTRY = CatalogEntry(mnist, natural=True, downloads=DOWNLOADS)


def existing(path: Path) -> Path:
    """Return the path of the file as published (.gz), or decompressed if only that exists."""
    return path if path.exists() else path.with_suffix("")


def read_idx(path: Path) -> np.ndarray:
    """Read an array in LeCun's idx format: a magic number with type and dimensions, the shape, the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dtype, dimensions = _DTYPES[content[2]], content[3]
        shape = np.frombuffer(content, ">i4", count=dimensions, offset=4)
        return np.frombuffer(content, dtype, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, KeyError, IndexError, ValueError, EOFError, ZlibError) as error:
        raise KeelError(f"data: {str(path)!r} is damaged or not in idx format ({error}); download it again") from error
