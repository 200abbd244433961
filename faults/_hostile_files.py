"""The hostile inputs of each reader: files that are written to make it fail, not valid files that were damaged."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from faults._hostile_archives import BATCHES, CONTENTS, archive, bomb, bundle, odd_safetensors, weights
from faults._hostile_arrays import JSONS, LINES, TABLES, hostile_header, odd_array, odd_parquet
from faults._hostile_hdf5 import odd_hdf5
from faults._hostile_images import PICTURES, odd_image_list, odd_tree

Hostile = Callable[[Random, Path], object]
"""Replaces files of a valid input in the folder."""


def one_of(file: str, *contents: bytes) -> Hostile:
    """Replace the file by one of these contents."""

    def replaced(rng: Random, folder: Path) -> None:
        (folder / file).write_bytes(rng.choice(contents))

    return replaced


def not_a_file(file: str) -> Hostile:
    """Replace the file by a folder, a dangling link, a link to itself or an empty file."""

    def replaced(rng: Random, folder: Path) -> None:
        (folder / file).unlink()
        kind = rng.randrange(4)
        if kind == 0:
            (folder / file).mkdir()
        elif kind == 1:
            (folder / file).symlink_to("nowhere")
        elif kind == 2:
            (folder / file).symlink_to(file)
        else:
            (folder / file).touch()

    return replaced


HOSTILE: dict[str, tuple[Hostile, ...]] = {
    "array": (hostile_header, odd_array, not_a_file("array.npy")),
    "csv": (one_of("train.csv", *TABLES), not_a_file("train.csv")),
    "parquet": (odd_parquet, not_a_file("train.parquet")),
    "picture": (one_of("a.png", *PICTURES), not_a_file("a.png")),
    "images": (odd_tree, one_of("train/anna/cat/1.png", *PICTURES)),
    "landmarks": (odd_image_list,),
    "hdf5": (odd_hdf5, not_a_file("a.h5")),
    "json": (one_of("a.json", *JSONS), not_a_file("a.json")),
    "femnist": (one_of("femnist/test/a.json", *JSONS), not_a_file("femnist/test/a.json")),
    "shakespeare": (one_of("shakespeare/train/a.json", *JSONS), not_a_file("shakespeare/train/a.json")),
    "jsonl": (one_of("texts.jsonl", *LINES), not_a_file("texts.jsonl")),
    "text": (one_of("texts.jsonl", *LINES), not_a_file("texts.jsonl")),
    "weights": (weights, odd_safetensors, not_a_file("model.pt")),
    "cifar": (one_of("data_batch_1", *BATCHES), not_a_file("data_batch_1")),
    "idx": (bomb, not_a_file("images.gz")),
    "bundle": (bundle,),
    "archive": (archive,),
    "prepared": (one_of("set/contents.json", *CONTENTS), not_a_file("set/train.npy"), not_a_file("set/contents.json")),
    "policy": (not_a_file("site.toml"),),
    "play": (not_a_file("play.txt"),),
    "stackoverflow": (
        not_a_file("stackoverflow/stackoverflow_test.h5"),
        not_a_file("stackoverflow/stackoverflow.word_count"),
    ),
}
