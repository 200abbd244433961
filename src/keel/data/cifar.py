"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), from their python batches, which are pickles: only arrays are admitted."""

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keel.data.federated import Examples, Pool
from keel.data.fetch import Download
from keel.data.preparation import Pixels
from keel.data.store import check, data_folder, prepared
from keel.errors import KeelError

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
MARGIN = 4
"""Pixels of the padding that the random crop is taken from."""


def cifar10(*, augment: bool = True) -> Pool:
    """60,000 colour photographs of 32x32 in ten classes."""
    pixels = Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), MARGIN * augment)
    return _load("cifar10", CIFAR10, "labels", 10, pixels)


def cifar100(*, augment: bool = True) -> Pool:
    """60,000 colour photographs of 32x32 in a hundred classes."""
    pixels = Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), MARGIN * augment)
    return _load("cifar100", CIFAR100, "fine_labels", 100, pixels)


def _load(name: str, download: Download, labels: str, classes: int, pixels: Pixels) -> Pool:
    files = [data_folder() / member for member in download.members]

    def make(place: Path) -> dict[str, Any]:
        for part, sources in ("train", files[:-1]), ("test", files[-1:]):
            batches = [read_batch(source, labels, DIGESTS[source.name]) for source in sources]
            np.save(place / f"{part}_inputs.npy", np.concatenate([images for images, _ in batches]))
            np.save(place / f"{part}_targets.npy", np.concatenate([targets for _, targets in batches]))
        return {}

    stored = prepared(name, files, {}, make)
    tensors = {array: torch.from_numpy(values) for array, values in stored.arrays.items()}
    train = Examples(tensors["train_inputs"], tensors["train_targets"])
    test = Examples(tensors["test_inputs"], tensors["test_targets"])
    return Pool(train, test, classes, prepare=pixels, sha256=stored.sha256)


def read_batch(path: Path, labels: str, digest: str) -> tuple[np.ndarray, np.ndarray]:
    """A batch's images (n, 3, 32, 32) as bytes and its labels. The published checksum comes before everything."""
    check(path, digest)
    batch = read_pickle(path)
    try:
        images = batch["data"].reshape(-1, 3, 32, 32)
        return images, np.array(batch[labels], dtype=np.int64)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise KeelError(f"data: {str(path)!r} holds no images of 3 x 32 x 32 with {labels}") from error


def read_pickle(path: Path) -> Any:
    """A pickle of text, numbers, lists, dicts and arrays of bytes; one that names anything else is refused."""
    try:
        return _ArraysOnly(BytesIO(path.read_bytes()), encoding="latin1").load()
    except KeelError as error:
        raise KeelError(f"data: {str(path)!r} {error}") from None
    except Exception as error:  # whatever a damaged stream makes the unpickler raise
        raise KeelError(f"data: {str(path)!r} is damaged or no pickle ({error})") from error


class _Array:
    """Stands for numpy's array while a pickle is read, so that no code of numpy is called by the file."""

    def __init__(self) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, kind, fortran, content = state
        if not (kind == "u1" and fortran is False and isinstance(content, str | bytes)):
            raise KeelError("holds an array that is not of bytes")
        raw = content.encode("latin1") if isinstance(content, str) else content
        self.values = np.frombuffer(raw, np.uint8).reshape(shape)

    def reshape(self, *shape: int) -> np.ndarray:
        return self.values.reshape(shape)


class _Kind(str):
    """Stands for numpy's dtype: its name."""

    def __setstate__(self, state: Any) -> None:
        pass


class _ArraysOnly(pickle.Unpickler):
    ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 (nobody writes to it)
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): lambda name, *_: _Kind(name),
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ADMITTED[module, name]
        except KeyError:
            raise KeelError(f"asks for {module}.{name}, which no array needs; nothing of it was run") from None
