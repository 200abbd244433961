"""Inputs as users have them: one array, or a tuple or dict of arrays, of any type of number."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from keel.core.stored_inputs import SeveralArrays
from keel.errors import KeelError, one_line

CHECKED = 1 << 26
"""How many bytes are checked at a time: a memory-mapped array may be larger than memory."""

LARGEST = 2**63 - 1
"""The largest whole number that is stored."""


def convert_inputs(inputs: Any, field: str) -> Tensor:
    """Return inputs as they are stored: floats as float32, whole numbers as they are; memory-mapped arrays stay so.

    Raises:
        KeelError: They are not numbers with one row per example; the message begins with `field`.
    """
    if isinstance(inputs, Mapping):
        named = {str(name): _tensor(part, f"{field}[{name!r}]") for name, part in inputs.items()}
        return cast(Tensor, SeveralArrays(named))
    if isinstance(inputs, tuple) and all(isinstance(part, np.ndarray | Tensor) for part in inputs):
        parts = tuple(_tensor(part, f"{field}[{number}]") for number, part in enumerate(inputs))
        return cast(Tensor, SeveralArrays(parts))
    return _tensor(inputs, field)


def _tensor(values: Any, field: str) -> Tensor:
    array = as_array(values, field)
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise KeelError(f"{field} must be numbers with one row per example (got {array.dtype} of shape {array.shape})")
    if array.dtype.kind == "f" and array.dtype != np.float32 and not isinstance(array, np.memmap):
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            array = array.astype(np.float32)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        if array.dtype.itemsize == 8 and (largest := array.max(initial=0)) > LARGEST:
            raise KeelError(f"{field} must be at most {LARGEST} (got {largest})")
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a read-only array, to which nothing is written
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    if not _finite(tensor):
        raise KeelError(f"{field} must be finite as 32-bit floats (got NaN or infinite values)")
    return tensor


def _finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite as float32."""
    if not tensor.is_floating_point():
        return True
    rows = max(1, CHECKED // max(1, 4 * tensor[:1].numel()))
    return all(bool(torch.isfinite(part.float()).all()) for part in torch.split(tensor, rows))


def as_array(values: Any, field: str) -> np.ndarray:
    """Return an array or a tensor as a NumPy array; bfloat16, which NumPy lacks, as float32.

    Raises:
        KeelError: It is none; the message begins with `field`.
    """
    if not isinstance(values, Tensor):
        return _array(values, field)
    try:
        values = values.detach().cpu()
        return cast(np.ndarray, (values.float() if values.dtype == torch.bfloat16 else values).numpy())
    except (RuntimeError, TypeError) as error:  # sparse, quantised, without content
        raise KeelError(f"{field} must be a dense tensor of numbers ({one_line(error)})") from None


def _array(values: Any, field: str) -> np.ndarray:
    if not hasattr(values, "__array__") and not hasattr(values, "__len__"):
        raise KeelError(
            f"{field} must be an array, or a data set with a length (got {type(values).__name__}, which has none)"
        )
    try:
        return values if isinstance(values, np.memmap) else np.asarray(values)
    except ValueError as error:
        raise KeelError(f"{field} must have rows of equal shape ({error}); pad them, or pass collate=") from None
