import gzip
from pathlib import Path

import numpy as np
import pytest

from keel import KeelError
from keel.data import catalog, mnist
from keel.data.mnist import read_idx


def idx(array: np.ndarray) -> bytes:
    kind = {"uint8": 8, "int32": 12}[array.dtype.name]
    header = bytes([0, 0, kind, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve training digits by three writers and six test digits; QMNIST has four more test digits."""
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    monkeypatch.setattr(mnist, "check", lambda *_: None)  # these are not the published files
    for part, qpart, count, extra in ("train", "train", 12, 0), ("t10k", "test", 6, 4):
        labels = rng.integers(0, 10, count + extra).astype(np.uint8)
        writers = np.zeros((count + extra, 8), np.int32)
        writers[:, 0] = labels
        writers[:, 2] = 100 + np.arange(count + extra) % 3
        images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        (tmp_path / f"mnist/{part}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"mnist/{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels[:count])))
        (tmp_path / f"mnist/qmnist-{qpart}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(writers)))
    return tmp_path / "mnist"


def test_writers_are_the_keys_and_files_may_be_compressed_or_not(small_mnist: Path) -> None:
    dataset = catalog.load("mnist", {})
    assert dataset.train.inputs.shape == (12, 1, 28, 28)
    assert dataset.test.inputs.shape == (6, 1, 28, 28)
    assert dataset.keys is not None
    assert dataset.keys.tolist() == [100, 101, 102] * 4


def test_different_labels_in_mnist_and_qmnist_are_refused(small_mnist: Path) -> None:
    (small_mnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(12, np.uint8))))
    with pytest.raises(KeelError, match="the train files of MNIST and QMNIST have different labels"):
        catalog.load("mnist", {})


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x03", b"\0\0\x07\x01\0\0\0\1\0", b"\0\0\x08\x01\0\0\0\5\1\2"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    for name, stored in ("plain", content), ("packed.gz", gzip.compress(content)), ("cut.gz", gzip.compress(b"x")[:-9]):
        (tmp_path / name).write_bytes(stored)
        with pytest.raises(KeelError, match=f"{name}' is damaged or not in idx format"):
            read_idx(tmp_path / name)


def test_the_published_digits_have_the_expected_counts() -> None:
    if catalog.CATALOG["mnist"].missing():
        pytest.skip("the data folder (KEEL_DATA) has no files of MNIST and QMNIST")
    dataset = catalog.load("mnist", {})
    assert dataset.train.inputs.shape == (60_000, 1, 28, 28)
    assert dataset.keys is not None
    assert len(np.unique(dataset.keys)) == 539
    assert np.bincount(dataset.train.targets).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(float(dataset.train.inputs.float().mean()) / 255 - 0.1307) < 1e-4


def test_files_other_than_the_published_ones_are_refused(small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("KEEL_DATA", str(small_mnist.parent))
    with pytest.raises(KeelError, match="train-images-idx3-ubyte' is not the published file"):
        catalog.load("mnist", {})
    assert not list((small_mnist.parent / "prepared").glob("*/*"))
