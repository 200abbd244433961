"""Conversion between the arrays of a model in a Flower message and Keel's flat vector of parameters."""

from math import prod

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from keel.errors import KeelError


def flatten_arrays(arrays: ArrayRecord) -> Tensor:
    """Concatenate the arrays of a model to one vector, in their order."""
    parts = []
    for name, array in arrays.items():
        if array.dtype != "float32":
            raise KeelError(
                f"arrays: {name} must be float32 (got {array.dtype}); a model with BatchNorm counters is not supported"
            )
        parts.append(torch.from_numpy(array.numpy().copy()).reshape(-1))
    return torch.cat(parts)


def split_into_arrays(theta: Tensor, shapes: dict[str, tuple[int, ...]]) -> ArrayRecord:
    """Split a vector into arrays of these names and shapes."""
    parts = torch.split(theta, [prod(shape) for shape in shapes.values()])
    return ArrayRecord({name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)})
