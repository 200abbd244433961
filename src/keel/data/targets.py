"""Targets as users have them: classes, numbers, several labels per example, or sequences of tokens."""

from typing import get_args

import numpy as np
import torch
from torch import Tensor

from keel.core.examples import TaskKind
from keel.errors import KeelError, unknown_name

MAX_LABEL = 1_000_000
"""The largest label. Larger ones are identifiers rather than classes, and the model's last layer would be huge."""
FEW = 50
"""Up to this many distinct whole numbers, stored as floats, may be classes as well as numbers to predict."""


def check_task(task: str | None) -> None:
    """Raise a KeelError unless the name is that of a kind of task, or None."""
    if task is not None and task not in get_args(TaskKind):
        raise unknown_name("task", task, get_args(TaskKind))


def infer_task(targets: np.ndarray, field: str) -> TaskKind:
    """Return the kind of task that the targets are for.

    Whole numbers are classes, in two or more dimensions tokens of a sequence; floats are numbers to predict; two or
    more columns of only 0 and 1 are labels that each hold or do not.

    Raises:
        KeelError: They could be of more than one kind.
    """
    if targets.dtype.kind == "b" or (targets.ndim == 2 and targets.shape[1] > 1 and np.isin(targets, (0, 1)).all()):
        return "multilabel" if targets.ndim > 1 else "classification"
    if targets.dtype.kind in "iu" and targets.ndim == 2 and targets.shape[1] == 1:
        raise KeelError(f"{field} must be one whole number per example (got shape {targets.shape}); use labels[:, 0]")
    if targets.dtype.kind != "f":
        return "classification" if targets.ndim == 1 else "sequence"
    distinct = np.unique(targets[:100_000])
    if targets.ndim == 1 and len(distinct) <= FEW and np.array_equal(distinct, np.floor(np.abs(distinct))):
        raise KeelError(
            f"{field} are whole numbers stored as floats, which may be classes or numbers to predict; name the task: "
            "'classification' or 'regression'"
        )
    return "regression"


def convert_targets(targets: np.ndarray, task: TaskKind, field: str) -> Tensor:
    """Return targets as a tensor: int64 for classes and tokens, float32 for numbers and several labels.

    Raises:
        KeelError: They do not suit the task; the message begins with `field`.
    """
    if targets.dtype.kind not in "fiub" or targets.ndim == 0:
        raise KeelError(f"{field} must be numbers, one row per example (got {targets.dtype} of shape {targets.shape})")
    if targets.dtype.kind == "f" and not np.isfinite(targets).all():
        raise KeelError(f"{field} must be finite (got NaN or infinite values)")
    if task == "regression":
        with np.errstate(over="ignore"):
            numbers = targets.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise KeelError(f"{field} must be finite as 32-bit floats (got {targets[~np.isfinite(numbers)][0]})")
        return torch.from_numpy(numbers)
    if task == "multilabel":
        if targets.ndim != 2 or not np.isin(targets, (0, 1)).all():
            raise KeelError(
                f"{field} of several labels must be 0 or 1, one column per label (got shape {targets.shape}, "
                f"{targets.dtype})"
            )
        return torch.from_numpy(targets.astype(np.float32))
    return torch.from_numpy(_whole_numbers(targets, task, field))


def _whole_numbers(targets: np.ndarray, task: TaskKind, field: str) -> np.ndarray:
    """Check class labels, or tokens, whose negative values are padding."""
    if task == "classification" and targets.ndim != 1:
        raise KeelError(f"{field} must be one whole number per example (got {targets.dtype} of shape {targets.shape})")
    if task == "sequence" and (targets.ndim < 2 or 0 in targets.shape[1:]):
        raise KeelError(f"{field} of a sequence must be whole numbers, one row per example (got shape {targets.shape})")
    with np.errstate(invalid="ignore"):  # what does not fit is refused below
        numbers = targets.astype(np.int64)
    if targets.dtype.kind == "f" and not np.array_equal(numbers, targets):
        raise KeelError(f"{field} must be whole numbers for task = {task!r} (got {targets.dtype}, with fractions)")
    least = 0 if task == "classification" else None
    if numbers.size and ((least is not None and numbers.min() < least) or numbers.max() > MAX_LABEL):
        wrong = numbers.max() if numbers.max() > MAX_LABEL else numbers.min()
        raise KeelError(f"{field} must be whole numbers from 0 to classes - 1 (got {wrong})")
    return numbers


def count_classes(task: TaskKind, *targets: Tensor) -> int:
    """Return how many classes the largest label requires; 0 if targets are not labels of classes."""
    if task not in ("classification", "sequence"):
        return 0
    return 1 + max(int(tensor.max()) for tensor in targets)


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
