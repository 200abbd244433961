"""A user's arrays from .npy files. Pickles are refused."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from keel.core.examples import Examples
from keel.data.dataset import Dataset
from keel.errors import KeelError
from keel.settings import PathText

MAX_LABEL = 1_000_000
"""The largest label. Larger ones are identifiers rather than classes, and the model's last layer would be huge."""


def arrays(
    *, inputs: PathText, labels: PathText, test_inputs: PathText, test_labels: PathText, keys: PathText | None = None
) -> Dataset:
    """Your arrays, one .npy file each; `keys` gives the client of each training example."""
    files = {"inputs": inputs, "labels": labels, "test_inputs": test_inputs, "test_labels": test_labels}
    stored = {name: read(Path(file), f"data.{name}") for name, file in files.items()}
    stored["labels"], stored["test_labels"], class_names = encode_texts(stored["labels"], stored["test_labels"])
    train = examples(stored["inputs"], stored["labels"], "data.")
    test = examples(stored["test_inputs"], stored["test_labels"], "data.test_")
    return as_dataset(train, test, None if keys is None else read(Path(keys), "data.keys"), class_names)


def as_dataset(train: Examples, test: Examples, keys: np.ndarray | None, class_names: Sequence[str] = ()) -> Dataset:
    """Make a data set with as many classes as the largest label requires; names of further classes are dropped."""
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise KeelError(
            f"data.test_inputs must have inputs of shape {tuple(train.inputs.shape[1:])}, as data.inputs has "
            f"(got {tuple(test.inputs.shape[1:])})"
        )
    classes = 1 + int(max(train.targets.max(), test.targets.max()))
    return Dataset(train, test, classes, keys=keys, class_names=tuple(class_names[:classes]))


def encode_texts(labels: np.ndarray, test_labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Convert labels that are text to their positions among the sorted labels.

    Returns:
        The labels, the test labels, and the sorted texts; if the labels are not text, as they are, and no texts.
    """
    if not (_are_texts(labels) and _are_texts(test_labels)):
        return labels, test_labels, ()
    names, positions = np.unique(np.concatenate([labels, test_labels]).astype(str), return_inverse=True)
    return positions[: len(labels)], positions[len(labels) :], tuple(names.tolist())


def _are_texts(labels: np.ndarray) -> bool:
    return labels.ndim == 1 and (
        labels.dtype.kind == "U" or (labels.dtype == object and all(isinstance(label, str) for label in labels))
    )


def read(path: Path, field: str) -> np.ndarray:
    """Read one array; an error names the spec's field and the file."""
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise KeelError(f"{field}: file {str(path)!r} does not exist") from None
    except (OSError, ValueError, EOFError, MemoryError) as error:
        # numpy's message would suggest to allow pickles
        raise KeelError(f"{field}: {str(path)!r} is not a .npy array of numbers or text") from error


def examples(inputs: np.ndarray, labels: np.ndarray, field: str = "data") -> Examples:
    """Convert arrays to float32 inputs and int64 labels; an error names the field, which begins with `field`."""
    if inputs.ndim == 0 or inputs.dtype.kind not in "fiub":
        raise KeelError(
            f"{field}inputs must be numbers with one row per example (got {inputs.dtype} of shape {inputs.shape})"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise KeelError(
            f"{field}labels must be one whole number per example (got {labels.dtype} of shape {labels.shape})"
        )
    if len(inputs) != len(labels):
        raise KeelError(f"{field}labels must have one label per input (got {len(labels)} for {len(inputs)} inputs)")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= MAX_LABEL:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise KeelError(f"{field}labels must be whole numbers from 0 to classes - 1 (got {wrong})")
    tensor = torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float32))
    if not torch.isfinite(tensor).all():
        raise KeelError(f"{field}inputs must be finite as 32-bit floats (got NaN or infinite values)")
    return Examples(tensor, torch.from_numpy(labels.astype(np.int64)))
