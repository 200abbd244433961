"""The user's own arrays, from .npy files. Nothing is unpickled."""

from pathlib import Path

import numpy as np
import torch

from keel.data.federated import Examples
from keel.errors import KeelError


def read(path: Path, field: str) -> np.ndarray:
    """One array; what is wrong with the file is said with its name and the spec's field."""
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise KeelError(f"{field}: no file {str(path)!r}") from None
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise KeelError(f"{field}: {str(path)!r} is not a .npy array of numbers ({reason})") from None
    if not isinstance(array, np.ndarray):
        raise KeelError(f"{field}: {str(path)!r} holds several arrays; accepted: a .npy file with one")
    return array


def examples(inputs: np.ndarray, labels: np.ndarray, field: str = "data") -> Examples:
    """Float inputs and integer labels as tensors."""
    if len(inputs) != len(labels):
        raise KeelError(
            f"{field}labels: {len(labels)} labels for {len(inputs)} inputs; accepted: one label for each input"
        )
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or (len(labels) and labels.min() < 0):
        raise KeelError(
            f"{field}labels: shape {labels.shape}, {labels.dtype}; accepted: one whole number from 0 for each input"
        )
    tensor = torch.from_numpy(np.ascontiguousarray(inputs))
    if not torch.isfinite(tensor).all():
        raise KeelError(f"{field}inputs: not all values are finite")
    return Examples(tensor.float(), torch.from_numpy(labels.astype(np.int64)))
