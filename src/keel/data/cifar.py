"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from their Python batches: pickles, read without executing code."""

import pickle
from collections.abc import Callable
from importlib import resources
from io import BytesIO
from pathlib import Path
from pickletools import genops
from typing import Any, Literal

import numpy as np
import torch

from keel.core.examples import Examples
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.fetch import Download
from keel.data.store import check, data_folder, prepared
from keel.data.transforms import Pixels
from keel.errors import KeelError, shown

CIFAR10 = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "md5:c58f30108f718f92721af3b95e74349a",
    "cifar-10-python.tar.gz",
    tuple(f"cifar-10-batches-py/{name}" for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]),
)
CIFAR100 = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    "md5:eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-python.tar.gz",
    ("cifar-100-python/train", "cifar-100-python/test"),
)
DIGESTS = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    "train": "md5:16019d7e3df5f24257cddd939b257f8d",
    "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
WIDTH = 32
MARGIN = 4
"""Pixels of padding for the random crop of a full-size image."""
Size = Literal[8, 16, 32]
"""The width and height to which images are averaged down."""


def cifar10(*, augment: bool = True, size: Size = 32) -> Dataset:
    """60,000 colour photographs of 32x32 pixels in 10 classes."""
    pixels = Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), _margin(augment, size))
    return _load("cifar10", CIFAR10, "labels", CIFAR10_CLASSES, pixels, size)


def cifar100(*, augment: bool = True, size: Size = 32) -> Dataset:
    """60,000 colour photographs of 32x32 pixels in 100 classes."""
    pixels = Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), _margin(augment, size))
    classes = resources.files(__package__).joinpath("cifar100_classes.txt").read_text(encoding="utf-8").split()
    return _load("cifar100", CIFAR100, "fine_labels", tuple(classes), pixels, size)


CIFAR10_ENTRY = CatalogEntry(cifar10, downloads=(CIFAR10,))
CIFAR100_ENTRY = CatalogEntry(cifar100, downloads=(CIFAR100,))


def _margin(augment: bool, size: int) -> int:
    return MARGIN * size // WIDTH if augment else 0


def _load(name: str, download: Download, labels: str, classes: tuple[str, ...], pixels: Pixels, size: int) -> Dataset:
    files = [data_folder() / member for member in download.members]

    def make(folder: Path) -> dict[str, Any]:
        for part, sources in ("train", files[:-1]), ("test", files[-1:]):
            batches = [read_batch(source, labels, DIGESTS[source.name]) for source in sources]
            np.save(folder / f"{part}_inputs.npy", np.concatenate([shrink(images, size) for images, _ in batches]))
            np.save(folder / f"{part}_targets.npy", np.concatenate([targets for _, targets in batches]))
        return {}

    stored = prepared(name, files, {} if size == WIDTH else {"size": size}, make)
    tensors = {array: torch.from_numpy(values) for array, values in stored.arrays.items()}
    train = Examples(tensors["train_inputs"], tensors["train_targets"])
    test = Examples(tensors["test_inputs"], tensors["test_targets"])
    return Dataset(train, test, len(classes), transform=pixels, sha256=stored.sha256, class_names=classes)


def shrink(images: np.ndarray, size: int) -> np.ndarray:
    """Average the pixels of square blocks, so that each image has `size` rows and columns."""
    block = images.shape[-1] // size
    blocks = images.reshape(*images.shape[:-2], size, block, size, block)
    return np.rint(blocks.mean(axis=(-3, -1))).astype(images.dtype)


def read_batch(path: Path, labels: str, digest: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images (n, 3, 32, 32) of a batch, as bytes, and its labels, after its checksum was verified."""
    check(path, digest)
    batch = read_pickle(path)
    try:
        images = batch["data"].reshape(-1, 3, 32, 32)
        return images, np.array(batch[labels], dtype=np.int64)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise KeelError(f"data: {str(path)!r} has no images of 3 x 32 x 32 with {labels}; download it again") from error


def read_pickle(path: Path) -> Any:
    """Read a pickle of text, numbers, lists, dicts and arrays of bytes; one that refers to anything else is refused."""
    try:
        content = path.read_bytes()
        for operation, argument, _ in genops(content):
            if "PUT" in operation.name and int(argument or 0) > len(content):  # it would allocate gigabytes
                raise KeelError("stores more objects than it has bytes")
        return _ArraysOnly(BytesIO(content), encoding="latin1").load()
    except KeelError as error:
        raise KeelError(f"data: {str(path)!r} {error}") from None
    except Exception as error:  # whatever a damaged stream makes the unpickler raise
        raise KeelError(f"data: {str(path)!r} is damaged or not a pickle ({shown(str(error))})") from error


class _Array:
    """Replaces numpy's array while a pickle is read, so that the file cannot call numpy's code."""

    def __init__(self) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, content = state
        if not (dtype == "u1" and fortran is False and isinstance(content, str | bytes)):
            raise KeelError("has an array whose elements are not bytes")
        raw = content.encode("latin1") if isinstance(content, str) else content
        self.values = np.frombuffer(raw, np.uint8).reshape(shape)

    def reshape(self, *shape: int) -> np.ndarray:
        return self.values.reshape(shape)


class _DType(str):
    """Replaces numpy's dtype: its name."""

    def __setstate__(self, state: Any) -> None:
        pass


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that resolves only the names that an array needs."""

    ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 (never modified)
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): lambda name, *_: _DType(name),
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise KeelError(
                f"refers to {shown(f'{module}.{name}')}, which no array needs; it was not executed"
            ) from None
