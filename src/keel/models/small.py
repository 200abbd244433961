"""A linear model, a multi-layer perceptron and a small convolutional network."""

from itertools import pairwise
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from keel.errors import KeelError
from keel.models.shapes import image

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


def cnn(
    input_shape: tuple[int, ...], classes: int, *, channels: list[Width] | None = None, hidden: Width = 64
) -> nn.Module:
    """Small convolutional network: 3x3 convolutions with ReLU, each followed by 2x2 pooling, and a hidden layer.

    Args:
        input_shape: (channels, height, width).
        classes: The number of classes.
        channels: The channels of each convolution; by default [16, 32].
        hidden: The units of the hidden layer.
    """
    inputs, height, width = image("cnn", input_shape)
    widths = [inputs, *([16, 32] if channels is None else channels)]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        height, width = height // 2, width // 2
    if min(height, width) < 1:
        size = f"{input_shape[1]}x{input_shape[2]}"
        raise KeelError(f"model.channels must have fewer entries for images of {size} pixels (got {widths[1:]})")
    features = widths[-1] * height * width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
