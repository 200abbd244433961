"""A user's arrays from .npy files. Pickles are refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.core.examples import Examples, TaskKind
from keel.data.dataset import Dataset
from keel.data.inputs import convert_inputs
from keel.data.targets import convert_targets, count_classes, encode_texts, infer_task
from keel.errors import KeelError
from keel.settings import PathText

MAPPED_FROM = 1 << 26
"""The size in bytes from which a file is memory-mapped instead of read."""


def arrays(
    *,
    inputs: PathText,
    labels: PathText,
    test_inputs: PathText,
    test_labels: PathText,
    keys: PathText | None = None,
    task: TaskKind | None = None,
) -> Dataset:
    """Your arrays, one .npy file each; `keys` gives the client of each training example.

    Labels are classes (whole numbers or texts), floats to predict, rows of 0 and 1, or tokens; `task` names the kind
    where it is not clear.
    """
    files = {"inputs": inputs, "labels": labels, "test_inputs": test_inputs, "test_labels": test_labels}
    stored = {name: read(Path(file), f"data.{name}") for name, file in files.items()}
    stored["labels"], stored["test_labels"], class_names = encode_texts(stored["labels"], stored["test_labels"])
    kind = task or infer_task(np.atleast_1d(stored["labels"]), "data.labels")
    train = examples(stored["inputs"], stored["labels"], "data.", kind)
    test = examples(stored["test_inputs"], stored["test_labels"], "data.test_", kind)
    return as_dataset(train, test, None if keys is None else read(Path(keys), "data.keys"), kind, class_names)


def as_dataset(
    train: Examples,
    test: Examples,
    keys: np.ndarray | None,
    task: TaskKind = "classification",
    class_names: Sequence[str] = (),
) -> Dataset:
    """Make a data set with as many classes as the largest label requires; names of further classes are dropped."""
    if train.packing != test.packing:
        raise KeelError("data.test_inputs must have the same parts as data.inputs, with the same types and shapes")
    if train.targets.shape[1:] != test.targets.shape[1:]:
        raise KeelError(
            f"data.test_labels must have targets of shape {tuple(train.targets.shape[1:])}, as data.labels has "
            f"(got {tuple(test.targets.shape[1:])})"
        )
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise KeelError(
            f"data.test_inputs must have inputs of shape {tuple(train.inputs.shape[1:])}, as data.inputs has "
            f"(got {tuple(test.inputs.shape[1:])})"
        )
    classes = count_classes(task, train.targets, test.targets)
    return Dataset(train, test, classes, keys=keys, task=task, class_names=tuple(class_names[:classes]))


def read(path: Path, field: str) -> np.ndarray:
    """Read one array; an error names the spec's field and the file."""
    try:
        if path.is_file() and path.stat().st_size >= MAPPED_FROM:
            return np.lib.format.open_memmap(path, mode="r")  # it refuses pickles
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise KeelError(f"{field}: file {str(path)!r} does not exist") from None
    except (OSError, ValueError, EOFError, MemoryError) as error:
        # numpy's message would suggest to allow pickles
        raise KeelError(f"{field}: {str(path)!r} is not a .npy array of numbers or text") from error


def examples(inputs: Any, targets: np.ndarray, field: str = "data.", task: TaskKind | None = None) -> Examples:
    """Convert arrays to stored examples; an error names the field, which begins with `field`.

    Args:
        task: The kind of task; by default it is inferred from the targets.
    """
    stored = convert_inputs(inputs, f"{field}inputs")
    targets = np.atleast_1d(targets)
    if len(stored) != len(targets):
        raise KeelError(f"{field}labels must have one label per input (got {len(targets)} for {len(stored)} inputs)")
    return Examples(stored, convert_targets(targets, task or infer_task(targets, f"{field}labels"), f"{field}labels"))
