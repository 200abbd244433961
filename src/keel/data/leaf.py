"""LEAF's json (Caldas et al., 2019): files in train/ and test/, each with its users' inputs x and labels y."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keel.data.federated import Examples, Pool
from keel.data.preparation import Preparation
from keel.data.store import data_folder, prepared
from keel.errors import KeelError

ADDRESS = "https://github.com/TalwalkarLab/leaf"

Encode = Callable[[list[Any], list[Any], Path], tuple[np.ndarray, np.ndarray]]
"""One user's x and y as arrays; what does not suit is a KeelError with the file's name."""


def load(name: str, encode: Encode, classes: int, prepare: Preparation) -> Pool:
    """What LEAF's preprocess.sh wrote for a data set; a key for each user."""
    files = {part: find(data_folder() / name / part) for part in ("train", "test")}

    def make(place: Path) -> dict[str, Any]:
        numbers: dict[str, int] = {}
        train = write(place, "train", files["train"], encode, numbers)
        test = write(place, "test", files["test"], encode, numbers)
        if np.isin(test, train).any():  # otherwise LEAF split by user, and nobody trains who is tested
            np.save(place / "test_keys.npy", test)
        np.save(place / "train_keys.npy", train)
        return {}

    stored = prepared(name, files["train"] + files["test"], {}, make)
    tensors = {array: torch.from_numpy(values) for array, values in stored.arrays.items()}
    return Pool(
        Examples(tensors["train_inputs"], tensors["train_targets"]),
        Examples(tensors["test_inputs"], tensors["test_targets"]),
        classes,
        keys=stored.arrays["train_keys"],
        test_keys=stored.arrays.get("test_keys"),
        prepare=prepare,
        sha256=stored.sha256,
    )


def find(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise KeelError(f"data: {str(folder)!r} has no *.json; accepted: the files that {ADDRESS} makes")
    return files


def write(place: Path, part: str, files: list[Path], encode: Encode, numbers: dict[str, int]) -> np.ndarray:
    """Saves a part's inputs and targets and gives its keys. One file at a time is held as Python's objects."""
    inputs, targets, keys = [], [], []
    for file in files:
        for user, x, y in read(file):
            encoded, labels = encode(x, y, file)
            inputs.append(encoded)
            targets.append(labels)
            keys.append(np.full(len(labels), numbers.setdefault(user, len(numbers)), dtype=np.int32))
    if not keys:
        raise KeelError(f"data: {str(files[0].parent)!r} holds no user; accepted: at least one")
    np.save(place / f"{part}_inputs.npy", np.concatenate(inputs))
    np.save(place / f"{part}_targets.npy", np.concatenate(targets))
    return np.concatenate(keys)


def read(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each user with its x and y. The other fields are not looked at: LEAF leaves some of them wrong after a split."""
    try:
        # An image has few greys: each is parsed once, which takes a third of the time and of the memory.
        held = json.loads(file.read_text(encoding="utf-8"), parse_float=cache(float))["user_data"]
        users = [(user, samples["x"], samples["y"]) for user, samples in held.items()]
        whole = all(isinstance(x, list) and isinstance(y, list) and len(x) == len(y) for _, x, y in users)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KeelError(f"data: {str(file)!r} is damaged or not LEAF's json ({error!r})") from error
    if not whole:
        raise KeelError(f"data: {str(file)!r} has a user without as many x as y; accepted: a list of each")
    yield from users
