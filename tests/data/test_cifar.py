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
    """A batch in the form of the published ones: protocol 2 as Python 2's cPickle wrote it, with numpy's old names."""
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
    """Six small batches where CIFAR-10 is looked for, with their own checksums."""
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    digests = {}
    for number, name in enumerate(cifar.CIFAR10.members):
        content = python_2_pickle(*batch(number))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        digests[Path(name).name] = f"md5:{hashlib.md5(content).hexdigest()}"
    monkeypatch.setattr(cifar, "DIGESTS", digests)
    return tmp_path


def test_the_batches_are_read_in_order_and_mapped(small_cifar10: Path) -> None:
    for _ in range(2):
        pool = catalog.load("cifar10", {})
        assert pool.train.inputs.shape == (100, 3, 32, 32)
        assert pool.test.inputs.shape == (20, 3, 32, 32)
        for number in range(5):
            images, labels = batch(number)
            part = slice(20 * number, 20 * number + 20)
            assert np.array_equal(pool.train.inputs[part].numpy().reshape(20, -1), images)
            assert pool.train.targets[part].tolist() == labels
    assert pool.train.inputs.dtype == torch.uint8


def test_it_trains_with_moved_images_and_equal_bits(small_cifar10: Path, tmp_path: Path) -> None:
    table = {
        "data": {"name": "cifar10", "clients": 10, "partition": "iid"},
        "model": {"name": "linear"},
        "algorithm": {"name": "mimemom"},  # whose full gradients are of moved images too
        "local": {"batch": 4},
        "rounds": 3,
        "participation": {"rate": 0.5},
    }
    runs = [
        keel.run({**table, "engine": {"name": engine}}, out=tmp_path / f"{engine}{number}")
        for engine in ("serial", "cohort")
        for number in range(2)
    ]
    prints = [run.summary["model_sha256"] for run in runs]
    assert prints[0] == prints[1]
    assert prints[2] == prints[3]
    weights = [torch.cat([p.detach().reshape(-1) for p in run.module.parameters()]) for run in (runs[0], runs[2])]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)
    plain = keel.run({**table, "data": {**table["data"], "augment": False}}, out=tmp_path / "plain")
    assert plain.summary["model_sha256"] not in prints


@pytest.mark.parametrize("harm", ["cut short", "changed"])
def test_a_file_that_is_not_the_published_one_is_refused(small_cifar10: Path, harm: str) -> None:
    file = small_cifar10 / cifar.CIFAR10.members[2]
    content = file.read_bytes()
    file.write_bytes(content[:-100] if harm == "cut short" else content[:-100] + bytes(100))
    with pytest.raises(KeelError, match=r"data_batch_3' is not the published file \(its md5 is .*, expected"):
        catalog.load("cifar10", {})
    assert not list((small_cifar10 / "prepared").glob("*/*"))


def test_a_missing_file_is_named_with_the_command_that_gets_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    with pytest.raises(KeelError, match=r"needs '.*data_batch_1', which is not there; accepted: keel data get cifar10"):
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
def test_a_pickle_that_asks_for_more_than_arrays_is_refused_and_not_run(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(KeelError, match=r"batch' asks for .*, which no array needs; nothing of it was run"):
        read_pickle(tmp_path / "batch")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", HEADER, pickle.dumps([1])[:-1]])
def test_a_damaged_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(KeelError, match="batch' is damaged or no pickle"):
        read_pickle(tmp_path / "batch")


@pytest.mark.parametrize(
    "content", [pickle.dumps({"labels": [1]}), pickle.dumps([1, 2]), pickle.dumps({"data": [1], "labels": [1]})]
)
def test_a_pickle_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(KeelError, match="batch' holds no images of 3 x 32 x 32 with labels"):
        read_batch(tmp_path / "batch", "labels", f"md5:{hashlib.md5(content).hexdigest()}")


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_the_real_images(name: str, classes: int) -> None:
    if catalog.CATALOG[name].missing():
        pytest.skip(f"the files of {name} are not in the data folder (KEEL_DATA)")
    pool = catalog.load(name, {})
    assert pool.train.inputs.shape == (50_000, 3, 32, 32)
    assert pool.test.inputs.shape == (10_000, 3, 32, 32)
    assert set(np.bincount(pool.train.targets)) == {50_000 // classes}
    pixels = pool.train.inputs.float() / 255
    assert isinstance(pool.prepare, cifar.Pixels)
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(pool.prepare.mean), rtol=0, atol=2e-4)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(pool.prepare.std), rtol=0, atol=2e-4)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped memory")
def test_the_images_are_the_files_own_pages(small_cifar10: Path) -> None:
    pool = catalog.load("cifar10", {})
    pool.train.inputs.float().sum()  # reads every page
    (file,) = (small_cifar10 / "prepared").glob("*/train_inputs.npy")
    account = Path("/proc/self/smaps").read_text().split(str(file))[1].split("VmFlags")[0]
    copied = [line.split()[1] for line in account.splitlines() if line.startswith("Anonymous:")]
    assert copied == ["0"], account  # so that any number of processes share them


def test_every_file_has_its_published_checksum() -> None:
    members = [*cifar.CIFAR10.members, *cifar.CIFAR100.members]
    assert {Path(member).name for member in members} == set(cifar.DIGESTS)
