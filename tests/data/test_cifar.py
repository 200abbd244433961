import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keel
from keel import KeelError
from keel.data import catalog, cifar
from keel.data.cifar import read_batch, read_pickle

HEADER = b"\x80\x02}q\x01("


def python_2_pickle(images: np.ndarray, labels: list[int], name: bytes = b"labels") -> bytes:
    """Pickle a batch as the published ones are: protocol 2 by Python 2's cPickle, with numpy's old module names."""
    count = len(images).to_bytes(2, "little")
    return b"".join(
        [
            HEADER,
            b"U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05",
            b"(K\x01M" + count + b"M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + images.size.to_bytes(4, "little"),
            images.tobytes(),
            b"tb",
            b"U" + bytes([len(name)]) + name + b"q\x08]q\x09(",
            b"".join(b"K" + bytes([label]) for label in labels),
            b"eu.",
        ]
    )


def batch(seed: int, count: int = 20) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, 10, count).tolist()


@pytest.fixture
def small_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write six small batches with the names of CIFAR-10's, and set their checksums."""
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    digests = {}
    for number, name in enumerate(cifar.CIFAR10.members):
        content = python_2_pickle(*batch(number))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        digests[Path(name).name] = f"md5:{hashlib.md5(content).hexdigest()}"
    monkeypatch.setattr(cifar, "DIGESTS", digests)
    return tmp_path


def test_batches_are_read_in_order_and_memory_mapped(small_cifar10: Path) -> None:
    for _ in range(2):
        dataset = catalog.load("cifar10", {})
        assert dataset.train.inputs.shape == (100, 3, 32, 32)
        assert dataset.test.inputs.shape == (20, 3, 32, 32)
        for number in range(5):
            images, labels = batch(number)
            part = slice(20 * number, 20 * number + 20)
            assert np.array_equal(dataset.train.inputs[part].numpy().reshape(20, -1), images)
            assert dataset.train.targets[part].tolist() == labels
    assert dataset.train.inputs.dtype == torch.uint8
    assert dataset.class_names[3] == "cat"


def test_augmented_training_gives_the_same_bits_twice_and_agrees_across_engines(
    small_cifar10: Path, tmp_path: Path
) -> None:
    table = {
        "data": {"name": "cifar10", "clients": 10, "partition": "iid"},
        "model": {"name": "linear"},
        "algorithm": {"name": "mimemom"},  # its full gradients use augmented images too
        "local": {"batch": 4},
        "rounds": 3,
        "participation": {"rate": 0.5},
    }
    runs = [
        keel.run({**table, "engine": {"name": engine}}, out=tmp_path / f"{engine}{number}")
        for engine in ("serial", "cohort")
        for number in range(2)
    ]
    hashes = [run.summary["model_sha256"] for run in runs]
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    weights = [torch.cat([p.detach().reshape(-1) for p in run.module.parameters()]) for run in (runs[0], runs[2])]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)
    plain = keel.run({**table, "data": {**table["data"], "augment": False}}, out=tmp_path / "plain")
    assert plain.summary["model_sha256"] not in hashes


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_file_that_is_not_the_published_one_is_refused(small_cifar10: Path, damage: str) -> None:
    file = small_cifar10 / cifar.CIFAR10.members[2]
    content = file.read_bytes()
    file.write_bytes(content[:-100] if damage == "truncated" else content[:-100] + bytes(100))
    with pytest.raises(KeelError, match=r"data_batch_3' is not the published file \(its md5 is .*, expected"):
        catalog.load("cifar10", {})
    assert not list((small_cifar10 / "prepared").glob("*/*"))


def test_the_error_for_a_missing_file_names_the_command_that_downloads_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    with pytest.raises(KeelError, match=r"requires the file '.*data_batch_1', .* run: keel data get cifar10"):
        catalog.load("cifar10", {})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"data": [Evil()]}, protocol=0),
        b"cbuiltins\neval\n(U\x18open('executed','w').close\x85R.",
        b"cnumpy\nload\n(U\x01x\x85R.",
        pickle.dumps(Path("x")),
    ],
    ids=["system", "nested", "eval", "numpy.load", "path"],
)
def test_a_pickle_that_refers_to_anything_but_arrays_is_refused_and_not_executed(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(KeelError, match=r"batch' refers to .*, which no array needs; it was not executed"):
        read_pickle(tmp_path / "batch")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", HEADER, pickle.dumps([1])[:-1]])
def test_a_damaged_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(KeelError, match="batch' is damaged or not a pickle"):
        read_pickle(tmp_path / "batch")


@pytest.mark.parametrize(
    "content", [pickle.dumps({"labels": [1]}), pickle.dumps([1, 2]), pickle.dumps({"data": [1], "labels": [1]})]
)
def test_a_pickle_without_images_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(KeelError, match="batch' has no images of 3 x 32 x 32 with labels"):
        read_batch(tmp_path / "batch", "labels", f"md5:{hashlib.md5(content).hexdigest()}")


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_the_published_images_have_the_expected_statistics(name: str, classes: int) -> None:
    if catalog.CATALOG[name].missing():
        pytest.skip(f"the data folder (KEEL_DATA) has no files of {name}")
    dataset = catalog.load(name, {})
    assert dataset.train.inputs.shape == (50_000, 3, 32, 32)
    assert dataset.test.inputs.shape == (10_000, 3, 32, 32)
    assert set(np.bincount(dataset.train.targets)) == {50_000 // classes}
    pixels = dataset.train.inputs.float() / 255
    assert isinstance(dataset.transform, cifar.Pixels)
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(dataset.transform.mean), rtol=0, atol=2e-4)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(dataset.transform.std), rtol=0, atol=2e-4)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="requires Linux's /proc/self/smaps")
def test_processes_share_the_pages_of_the_prepared_file(small_cifar10: Path) -> None:
    dataset = catalog.load("cifar10", {})
    dataset.train.inputs.float().sum()  # reads every page
    (file,) = (small_cifar10 / "prepared").glob("*/train_inputs.npy")
    entry = Path("/proc/self/smaps").read_text().split(str(file))[1].split("VmFlags")[0]
    copied = [line.split()[1] for line in entry.splitlines() if line.startswith("Anonymous:")]
    assert copied == ["0"], entry


def test_every_file_has_a_checksum() -> None:
    members = [*cifar.CIFAR10.members, *cifar.CIFAR100.members]
    assert {Path(member).name for member in members} == set(cifar.DIGESTS)
