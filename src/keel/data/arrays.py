"""A user's arrays from .npy files. Pickles are refused."""

import sys
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from torch import Tensor

from keel.core.examples import Examples, TaskKind
from keel.core.stored_inputs import Items
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.inputs import convert_inputs
from keel.data.targets import convert_targets, count_classes, encode_texts, infer_task
from keel.errors import KeelError
from keel.settings import PathText

MAPPED_FROM = 1 << 26
"""The size in bytes from which a file is memory-mapped instead of read."""
HEADER_ERRORS = (ValueError, TypeError, ArithmeticError, SyntaxError, TokenError, EOFError, MemoryError, RecursionError)
"""What numpy raises for a damaged header, which it evaluates as a Python literal."""


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

    Labels are classes (whole numbers from 0, or text), numbers to predict (floats), several labels per example (columns
    of 0 and 1) or tokens; `task` names the kind where it is not clear.
    """
    files = {"inputs": inputs, "labels": labels, "test_inputs": test_inputs, "test_labels": test_labels}
    stored = {name: read(Path(file), f"data.{name}") for name, file in files.items()}
    owners = None if keys is None else read(Path(keys), "data.keys")
    return make_dataset(
        (stored["inputs"], stored["labels"]), (stored["test_inputs"], stored["test_labels"]), owners, task
    )


ENTRY = CatalogEntry(arrays, natural=True)


def make_dataset(
    train: tuple[Any, np.ndarray],
    test: tuple[Any, np.ndarray],
    keys: np.ndarray | None,
    task: TaskKind | None = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """Make a data set from inputs and targets.

    Args:
        task: The kind of task; by default it is inferred from the targets.
        class_names: The names of the classes, if the targets are not texts.
    """
    targets, test_targets, texts = encode_texts(np.atleast_1d(train[1]), np.atleast_1d(test[1]))
    kind = task or infer_task(targets, "data.labels")
    return as_dataset(
        examples(train[0], targets, "data.", kind),
        examples(test[0], test_targets, "data.test_", kind),
        keys,
        kind,
        texts or class_names,
    )


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
    integers = [not part.inputs.is_floating_point() for part in (train, test) if isinstance(part.inputs, Tensor)]
    if len(set(integers)) > 1:
        kinds = ["integers" if whole else "floats" for whole in integers]
        raise KeelError(f"data.test_inputs must be {kinds[0]}, as data.inputs are (got {kinds[1]})")
    for field, array, other in (("inputs", train.inputs, test.inputs), ("labels", train.targets, test.targets)):
        if array.shape[1:] != other.shape[1:] and not train.variable:
            raise KeelError(
                f"data.test_{field} must have {field} of shape {tuple(array.shape[1:])}, as data.{field} has "
                f"(got {tuple(other.shape[1:])})"
                + ("; pass collate= to pad items of different lengths" if isinstance(train.inputs, Items) else "")
            )
    classes = count_classes(task, train.targets, test.targets)
    return Dataset(train, test, classes, keys=keys, task=task, class_names=tuple(class_names[:classes]))


def read(path: Path, field: str) -> np.ndarray:
    """Read one array; an error names the spec's field and the file."""
    try:
        if not path.exists():
            raise KeelError(f"{field}: file {str(path)!r} does not exist")
        if not path.is_file():  # a pipe would block
            raise ValueError("not a file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header of Python 2, or one that is not a literal
            _check_header(path)
            array = np.lib.format.open_memmap(path, mode="r")
        if array.dtype.kind == "U" and (_code_points(array) > sys.maxunicode).any():
            raise ValueError("not a text")
        return array if array.nbytes >= MAPPED_FROM else np.array(array)
    except KeelError:
        raise
    except (OSError, *HEADER_ERRORS) as error:
        # numpy's message would suggest to allow pickles
        raise KeelError(f"{field}: {str(path)!r} is not a .npy array of numbers or text") from error


def _check_header(path: Path) -> None:
    """Raise a ValueError if the file has pickles or fewer bytes than its header declares.

    Numpy allocates what a header declares, and divides by the size of an element.
    """
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in headers:
            raise ValueError(f"version {version} of the format is for records")
        shape, _, dtype = headers[version](file)
        left = path.stat().st_size - file.tell()
    if dtype.hasobject or not dtype.itemsize or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{dtype} of shape {shape}")
    if prod(shape) * dtype.itemsize > left:
        raise ValueError(f"{dtype} of shape {shape} in {left} bytes")


def _code_points(texts: np.ndarray) -> np.ndarray:
    content = np.ascontiguousarray(texts).reshape(-1)
    return content.view(np.dtype(np.uint32).newbyteorder(texts.dtype.byteorder))


def examples(inputs: Any, targets: np.ndarray, field: str, task: TaskKind = "classification") -> Examples:
    """Convert arrays to stored examples; an error names the field, which begins with `field`."""
    stored = convert_inputs(inputs, f"{field}inputs")
    if len(stored) != len(targets):
        raise KeelError(f"{field}labels must have one label per input (got {len(targets)} for {len(stored)} inputs)")
    return Examples(stored, convert_targets(targets, task, f"{field}labels"))
