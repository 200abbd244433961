"""Data sets: the files of a small valid one, and how they are read."""

import gzip
import io
import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet

from faults._small_files import Files, checked, hdf5, npy, picture
from keel.data import (
    arrays,
    cifar,
    femnist,
    images,
    landmarks,
    leaf,
    mnist,
    shakespeare,
    stackoverflow,
    table,
    text,
)
from keel.errors import KeelError


def read_one_array(folder: Path) -> None:
    """Read an array, and use it as inputs, as labels and as keys."""
    values = arrays.read(folder / "array.npy", "data.inputs")
    for use in (
        lambda: arrays.make_dataset((values, np.zeros(4, int)), (values, np.zeros(4, int)), None),
        lambda: arrays.make_dataset((np.zeros((4, 1)), values), (np.zeros((4, 1)), values), None),
        lambda: arrays.make_dataset((np.zeros((4, 1)), np.arange(4)), (np.zeros((4, 1)), np.arange(4)), values),
    ):
        with suppress(KeelError):
            checked(use())


@cache
def array_files() -> Files:
    inputs = np.arange(24, dtype=np.float32).reshape(8, 3)
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    keys = np.array(["a", "b"] * 4)
    return {
        "inputs.npy": npy(inputs),
        "labels.npy": npy(labels),
        "test_inputs.npy": npy(inputs[:4]),
        "test_labels.npy": npy(labels[:4]),
        "keys.npy": npy(keys),
    }


def read_arrays(folder: Path) -> None:
    checked(arrays.arrays(**{name.removesuffix(".npy"): str(folder / name) for name in array_files()}))


@cache
def csv_files() -> Files:
    rows = [f"{'abc'[i % 3]},{i}.5,{i * i},{'yes' if i % 2 else 'no'}" for i in range(12)]
    content = "\n".join(["client,age,dose,label", *rows]).encode()
    return {"train.csv": content, "test.csv": content}


def read_csv(folder: Path) -> None:
    file, test_file = str(folder / "train.csv"), str(folder / "test.csv")
    checked(table.table(file=file, client="client", label="label", test_file=test_file))


@cache
def parquet_files() -> Files:
    columns = {"client": list("abcabcabcabc"), "age": list(range(12)), "label": [i / 4 for i in range(12)]}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return {"train.parquet": file.getvalue()}


def read_parquet(folder: Path) -> None:
    checked(table.table(file=str(folder / "train.parquet"), client="client", label="label"))


@cache
def image_files() -> Files:
    return {
        "train/anna/cat/1.png": picture("PNG"),
        "train/anna/dog/1.jpg": picture("JPEG"),
        "train/ben/cat/1.bmp": picture("BMP"),
        "train/ben/dog/1.webp": picture("WEBP"),
        "test/cat/1.png": picture("PNG", 9),
    }


def read_images(folder: Path) -> None:
    checked(images.images(folder=str(folder), size=8))


SPLIT = replace(landmarks.LANDMARKS, users=2, train_images=3, test_images=1, classes=4)


@cache
def landmark_files() -> Files:
    train = "user_id,image_id,class\n7,0a1b,3\n7,f00d,0\n12,0a1f,3\n"
    root = f"{SPLIT.folder}/{SPLIT.images}"
    return {
        f"{SPLIT.folder}/{SPLIT.train}": train.encode(),
        f"{SPLIT.folder}/test.csv": b"image_id,class\nabcd,1\n",
        **{f"{root}/{name}.jpg": picture("JPEG") for name in ("0a1b", "f00d", "0a1f", "abcd")},
    }


def read_landmarks(folder: Path) -> None:
    checked(landmarks.load(SPLIT, 8, True))


@cache
def femnist_files() -> Files:
    def part(user: str) -> bytes:
        pixels = [[(i * j) % 256 / 255 for i in range(784)] for j in (1, 7)]
        return json.dumps({"users": [user], "user_data": {user: {"x": pixels, "y": [3, 61]}}}).encode()

    return {"femnist/train/a.json": part("f1"), "femnist/test/a.json": part("f2")}


@cache
def shakespeare_files() -> Files:
    def part(user: str) -> bytes:
        texts = ["To be, or not to be" + " " * 61, "x" * 80]
        return json.dumps({"users": [user], "user_data": {user: {"x": texts, "y": ["a", "."]}}}).encode()

    return {"shakespeare/train/a.json": part("HAMLET"), "shakespeare/test/a.json": part("HAMLET")}


@cache
def play_files() -> Files:
    speech = "\n".join(f"  {role}. Who is there, and why do you stand in line {i}?" for i in range(6) for role in "AB")
    play = f"THE COMEDY\n\nby William Shakespeare\n\n{speech}\n"
    return {"play.txt": f"first\nby William Shakespeare\n{play}{play}".encode()}


def read_play(folder: Path) -> None:
    lines = shakespeare.roles(shakespeare.read(folder / "play.txt"))
    if lines:
        shakespeare.windows([shakespeare.encode(text, folder) for text in lines.values()], 0.5)


@cache
def word_files() -> Files:
    def fill(opened: h5py.File) -> None:
        for user, sentences in ("01", ["how to code", "i code the code"]), ("12", ["the"]):
            group = opened.create_group(f"examples/{user}")
            group.create_dataset("tokens", data=sentences, dtype=h5py.string_dtype())

    counts = "".join(f"{word} {100 - place}\n" for place, word in enumerate(("the", "to", "i", "a", "how", "code")))
    return {
        "stackoverflow/stackoverflow_train.h5": hdf5(fill),
        "stackoverflow/stackoverflow_test.h5": hdf5(fill),
        "stackoverflow/stackoverflow.word_count": counts.encode(),
    }


def read_words(folder: Path) -> None:
    checked(stackoverflow.stackoverflow(users=2, vocabulary=5, length=4))


@cache
def text_files() -> Files:
    lines = [{"user": user, "text": f"One two. Three, {user}! Four? Five. Six"} for user in ("anna", "ben", 3)]
    return {"texts.jsonl": "\n".join(map(json.dumps, lines)).encode()}


def read_text(folder: Path) -> None:
    checked(text.text(file=str(folder / "texts.jsonl"), vocabulary=20, length=5))


@cache
def idx_files() -> Files:
    content = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 3]) + bytes(range(18))
    return {"images.gz": gzip.compress(content, mtime=0), "images": content}


def read_idx(folder: Path) -> None:
    for name in idx_files():
        mnist.read_idx(folder / name)


@cache
def batch_files() -> Files:
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
    dtype = b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
    state = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
    labels = b"tbU\x06labelsq\x08]q\x09(K\x03eu."
    return {"data_batch_1": b"\x80\x02}q\x01(U\x04dataq\x02" + array + dtype + state + bytes(3072) + labels}


def read_batch(folder: Path) -> None:
    file = folder / "data_batch_1"
    digest = f"sha256:{sha256(file.read_bytes() if file.is_file() else b'').hexdigest()}"
    batch, labels = cifar.read_batch(file, "labels", digest)
    assert batch.shape[1:] == (3, 32, 32)
    assert len(labels) == len(batch)


@cache
def picture_files() -> Files:
    return {f"a.{kind.lower()}": picture(kind) for kind in ("PNG", "JPEG", "BMP", "WEBP")}


def read_pictures(folder: Path) -> None:
    for name in picture_files():
        assert images.decode(folder / name, 4).shape == (3, 4, 4)


def read_hdf5(folder: Path) -> None:
    sentences = [sentence for _, sentences in stackoverflow.read(folder / "a.h5") for sentence in sentences]
    assert not any("secret" in word for sentence in sentences for word in sentence), "it has read another file"


def read_json(folder: Path) -> None:
    for _, x, y in leaf.read(folder / "a.json"):
        femnist.images(x, y, folder)
        with suppress(KeelError):
            shakespeare.samples(x, y, folder)
