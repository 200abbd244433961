"""The readers of files that users bring, each with a small valid input: its files by path, and how they are read."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.torch
import torch

from faults import _dataset_readers as of
from faults._small_files import Files, checked, npy
from keel.data import (
    femnist,
    shakespeare,
    store,
    table,
    text,
)
from keel.data.fetch import Download, fetch
from keel.deploy.approval import read_app
from keel.deploy.site_policy import read_policy
from keel.models.weights import load_initial


@dataclass(frozen=True)
class Reader:
    """Makes the files of a valid input, and reads them from a folder, which KEEL_DATA names."""

    files: Callable[[], Files]
    read: Callable[[Path], object]
    weight: int = 1
    """How often it is drawn: readers of a single file are cheap."""


@cache
def weight_files() -> Files:
    tensors = torch.nn.Linear(3, 2).state_dict()
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save(tensors, zipped)
    torch.save(tensors, legacy, _use_new_zipfile_serialization=False)
    return {
        "model.safetensors": safetensors.torch.save(tensors),
        "model.pt": zipped.getvalue(),
        "old.pt": legacy.getvalue(),
    }


def read_weights(folder: Path) -> None:
    for name in weight_files():
        module = torch.nn.Linear(3, 2)
        load_initial(module, str(folder / name))
        assert all(torch.isfinite(tensor).all() for tensor in module.state_dict().values())


@cache
def prepared_files() -> Files:
    def make(folder: Path) -> dict[str, Any]:
        np.save(folder / "train.npy", np.arange(6))
        np.save(folder / "keys.npy", np.arange(2))
        return {"words": 12}

    with TemporaryDirectory() as name:
        store._make(Path(name) / "set", make)
        return {f"set/{file.name}": file.read_bytes() for file in (Path(name) / "set").iterdir()}


def read_prepared(folder: Path) -> None:
    stored = store._open(folder / "set")
    assert stored.facts == {"words": 12}
    assert stored.arrays["train"].tolist() == [0, 1, 2, 3, 4, 5]
    assert stored.arrays["keys"].tolist() == [0, 1]


@cache
def policy_files() -> Files:
    fields = 'study = "s"\nexpires = 2031-01-31\nalgorithms = ["fedavg"]\nevaluation = true\nclip_norm = 1.5\n'
    counts = ("min_batch", "min_steps", "min_examples", "max_rounds", "max_reports", "min_test_examples")
    limits = ("timeout_seconds", "max_memory_mb", "max_reply_mb", "retention_days")
    return {"site.toml": (fields + "".join(f"{name} = 8\n" for name in counts + limits)).encode()}


@cache
def bundle_files() -> Files:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", "[project]\nname = 'app'\n")
        archive.writestr("app/task.py", "pass\n" * 40)
    return {"app.fab": file.getvalue()}


@cache
def archive_files() -> Files:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for name in "set/train", "set/test":
            member = tarfile.TarInfo(name)
            member.size = 700
            archive.addfile(member, io.BytesIO(b"x" * 700))
    return {"set.tar.gz": file.getvalue()}


def read_archive(folder: Path) -> None:
    digest = f"sha256:{sha256((folder / 'set.tar.gz').read_bytes()).hexdigest()}"
    fetch(Download("http://127.0.0.1:9", digest, "set.tar.gz", ("set/train", "set/test")), folder, lambda *_: None)


def one_of(files: Callable[[], Files], name: str, renamed: str = "") -> Callable[[], Files]:
    """Only one file of an input."""
    return lambda: {renamed or name: files()[name]}


READERS = {
    "array": Reader(lambda: {"array.npy": npy(np.array([[1.5], [2], [0], [1]]))}, of.read_one_array, 5),
    "csv": Reader(
        one_of(of.csv_files, "train.csv"),
        lambda f: table.table(file=str(f / "train.csv"), client="client", label="label"),
        8,
    ),
    "picture": Reader(of.picture_files, of.read_pictures, 6),
    "json": Reader(one_of(of.femnist_files, "femnist/train/a.json", "a.json"), of.read_json, 4),
    "jsonl": Reader(of.text_files, lambda folder: text.split_sentences(text.read(folder / "texts.jsonl")), 8),
    "hdf5": Reader(one_of(of.word_files, "stackoverflow/stackoverflow_train.h5", "a.h5"), of.read_hdf5, 6),
    "arrays": Reader(of.array_files, of.read_arrays),
    "table": Reader(of.csv_files, of.read_csv),
    "parquet": Reader(of.parquet_files, of.read_parquet),
    "images": Reader(of.image_files, of.read_images),
    "landmarks": Reader(of.landmark_files, of.read_landmarks),
    "femnist": Reader(of.femnist_files, lambda folder: checked(femnist.femnist())),
    "shakespeare": Reader(of.shakespeare_files, lambda folder: checked(shakespeare.shakespeare(source="leaf"))),
    "play": Reader(of.play_files, of.read_play, 4),
    "stackoverflow": Reader(of.word_files, of.read_words),
    "text": Reader(of.text_files, of.read_text),
    "idx": Reader(of.idx_files, of.read_idx, 8),
    "cifar": Reader(of.batch_files, of.read_batch, 8),
    "weights": Reader(weight_files, read_weights, 4),
    "prepared": Reader(prepared_files, read_prepared, 8),
    "policy": Reader(policy_files, lambda folder: read_policy(folder / "site.toml"), 8),
    "bundle": Reader(bundle_files, lambda folder: read_app((folder / "app.fab").read_bytes()), 8),
    "archive": Reader(archive_files, read_archive, 5),
}
