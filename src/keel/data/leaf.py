"""LEAF's JSON format (Caldas et al., 2019): files in train/ and test/ with the inputs x and labels y of each user."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keel.core.examples import Examples
from keel.core.transforms import Transform
from keel.data.dataset import Dataset
from keel.data.store import data_folder, prepared
from keel.errors import KeelError, shown

ADDRESS = "https://github.com/TalwalkarLab/leaf"

Encode = Callable[[list[Any], list[Any], Path], tuple[np.ndarray, np.ndarray]]
"""Converts one user's x and y to arrays; raises a KeelError that names the file if they are invalid."""


def load(name: str, encode: Encode, classes: int, transform: Transform) -> Dataset:
    """Load the files that LEAF's preprocess.sh wrote for a data set. Each user is a natural client."""
    files = {part: json_files(data_folder() / name / part) for part in ("train", "test")}

    def make(folder: Path) -> dict[str, Any]:
        user_numbers: dict[str, int] = {}
        train_keys = write(folder, "train", files["train"], encode, user_numbers)
        test_keys = write(folder, "test", files["test"], encode, user_numbers)
        if np.isin(test_keys, train_keys).any():  # otherwise LEAF split by user: the test users do not train
            np.save(folder / "test_keys.npy", test_keys)
        np.save(folder / "train_keys.npy", train_keys)
        return {}

    stored = prepared(name, files["train"] + files["test"], {}, make)
    tensors = {array: torch.from_numpy(values) for array, values in stored.arrays.items()}
    return Dataset(
        Examples(tensors["train_inputs"], tensors["train_targets"]),
        Examples(tensors["test_inputs"], tensors["test_targets"]),
        classes,
        keys=stored.arrays["train_keys"],
        test_keys=stored.arrays.get("test_keys"),
        transform=transform,
        sha256=stored.sha256,
    )


def json_files(folder: Path) -> list[Path]:
    """Return the JSON files in a folder, sorted."""
    files = sorted(file for file in folder.glob("*.json") if file.is_file())  # a pipe would block
    if not files:
        raise KeelError(f"data: {str(folder)!r} has no *.json files; make them with {ADDRESS}")
    return files


def write(folder: Path, part: str, files: list[Path], encode: Encode, user_numbers: dict[str, int]) -> np.ndarray:
    """Save the inputs and targets of "train" or "test" and return the keys: one number per user.

    Only one file at a time is in memory as Python objects.
    """
    inputs, targets, keys = [], [], []
    for file in files:
        for user, x, y in read(file):
            encoded, labels = encode(x, y, file)
            inputs.append(encoded)
            targets.append(labels)
            keys.append(np.full(len(labels), user_numbers.setdefault(user, len(user_numbers)), dtype=np.int32))
    if not keys:
        raise KeelError(f"data: {str(files[0].parent)!r} has no users; at least one is required")
    np.save(folder / f"{part}_inputs.npy", np.concatenate(inputs))
    np.save(folder / f"{part}_targets.npy", np.concatenate(targets))
    return np.concatenate(keys)


def read(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield each user with its x and y. The other fields are ignored: some are wrong after LEAF's split."""
    try:
        # An image has few distinct values: parsing each once takes a third of the time and of the memory.
        user_data = json.loads(file.read_text(encoding="utf-8"), parse_float=cache(float))["user_data"]
        users = [(user, samples["x"], samples["y"]) for user, samples in user_data.items()]
        wrong = [u for u, x, y in users if not (isinstance(x, list) and isinstance(y, list) and len(x) == len(y))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__} {error}"
        raise KeelError(f"data: {str(file)!r} is damaged or not in LEAF's format ({reason}); make it again") from error
    if wrong:
        raise KeelError(f"data: the user {shown(wrong[0])} in {str(file)!r} must have lists x and y of equal length")
    yield from users
