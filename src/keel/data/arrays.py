"""The user's own arrays, from .npy files. Nothing is unpickled."""

from pathlib import Path

import numpy as np
import torch

from keel.data.federated import Examples, Pool
from keel.errors import KeelError
from keel.settings import PathText

MOST_CLASSES = 1_000_000


def arrays(
    *, inputs: PathText, labels: PathText, test_inputs: PathText, test_labels: PathText, keys: PathText | None = None
) -> Pool:
    """The user's own arrays, a .npy file each; keys say who holds what."""
    train = examples(read(Path(inputs), "data.inputs"), read(Path(labels), "data.labels"), "data.")
    test = examples(
        read(Path(test_inputs), "data.test_inputs"), read(Path(test_labels), "data.test_labels"), "data.test_"
    )
    return pool(train, test, None if keys is None else read(Path(keys), "data.keys"))


def pool(train: Examples, test: Examples, keys: np.ndarray | None) -> Pool:
    """Arrays that fit together, with as many classes as the labels tell."""
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise KeelError(
            f"data.test_inputs: shape {tuple(test.inputs.shape[1:])} of an input; "
            f"accepted: {tuple(train.inputs.shape[1:])}, as in data.inputs"
        )
    if keys is not None and keys.shape != (len(train),):
        raise KeelError(f"data.keys: shape {keys.shape} for {len(train)} inputs; accepted: one key for each input")
    return Pool(train, test, 1 + int(max(train.targets.max(), test.targets.max())), keys=keys)


def read(path: Path, field: str) -> np.ndarray:
    """One array; what is wrong with the file is said with its name and the spec's field."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise KeelError(f"{field}: no file {str(path)!r}") from None
    except (OSError, ValueError, EOFError, MemoryError) as error:
        # numpy's own words would suggest to allow pickles
        raise KeelError(f"{field}: {str(path)!r} is not a .npy array of numbers or text") from error
    return array


def examples(inputs: np.ndarray, labels: np.ndarray, field: str = "data") -> Examples:
    """Float inputs and integer labels as tensors."""
    if inputs.ndim == 0 or inputs.dtype.kind not in "fiub":
        raise KeelError(f"{field}inputs: shape {inputs.shape}, {inputs.dtype}; accepted: numbers, one row per example")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise KeelError(
            f"{field}labels: shape {labels.shape}, {labels.dtype}; accepted: one whole number from 0 for each input"
        )
    if len(inputs) != len(labels):
        raise KeelError(
            f"{field}labels: {len(labels)} labels for {len(inputs)} inputs; accepted: one label for each input"
        )
    if len(labels) and labels.max() > MOST_CLASSES:
        raise KeelError(f"{field}labels: {labels.max()}; accepted: whole numbers from 0 without large gaps")
    tensor = torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float32))
    if not torch.isfinite(tensor).all():
        raise KeelError(f"{field}inputs: not all values are finite as 32-bit floats")
    return Examples(tensor, torch.from_numpy(labels.astype(np.int64)))
