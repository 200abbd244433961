"""Conversion between the arrays of a model in a Flower message and Keel's flat vector of parameters."""

import warnings
from math import prod

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from keel.data.arrays import HEADER_ERRORS
from keel.errors import KeelError, shown


def flatten_arrays(arrays: ArrayRecord) -> Tensor:
    """Concatenate the arrays of a model to one vector, in their order."""
    parts = []
    for name, array in arrays.items():
        if array.dtype != "float32":
            raise KeelError(
                f"arrays: {name} must be float32 (got {array.dtype}); a model with BatchNorm counters is not supported"
            )
        parts.append(torch.from_numpy(_values(name, array)).reshape(-1))
    return torch.cat(parts)


def _values(name: str, array: Array) -> np.ndarray:
    """Return a copy of the values of an array, if they have the type and shape that it declares."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header that is not a literal
            values = array.numpy().copy()
    except HEADER_ERRORS as error:
        raise KeelError(f"arrays: {shown(name)} cannot be read ({shown(str(error))})") from None
    if values.dtype != np.float32 or values.shape != tuple(array.shape):
        raise KeelError(f"arrays: {shown(name)} must be {array.dtype} of shape {array.shape}, as it declares")
    return values


def split_into_arrays(theta: Tensor, shapes: dict[str, tuple[int, ...]]) -> ArrayRecord:
    """Split a vector into arrays of these names and shapes."""
    parts = torch.split(theta, [prod(shape) for shape in shapes.values()])
    return ArrayRecord({name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)})
