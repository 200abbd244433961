"""A linear model and a multi-layer perceptron."""

from itertools import pairwise
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

Width = Annotated[int, Field(ge=1)]


def linear(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Softmax regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))


def mlp(input_shape: tuple[int, ...], classes: int, *, hidden: list[Width] | None = None) -> nn.Module:
    """Multi-layer perceptron with ReLU; by default one hidden layer of 64 units."""
    widths = [prod(input_shape), *([64] if hidden is None else hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
