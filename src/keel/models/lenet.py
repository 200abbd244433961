"""The LeNet-like network of Hsu et al. (2020, Federated Visual Classification), the paper's main model on CIFAR."""

from torch import nn

from keel.errors import KeelError
from keel.models.shapes import image

MIN_SIDE = 16
"""The smallest height and width: one pixel is left after both convolutions and both poolings."""


def lenet(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64 channels with max-pooling, then fully connected layers of 384 and 192."""
    channels, height, width = image("lenet", input_shape)
    if min(height, width) < MIN_SIDE:
        raise KeelError(
            f"model.name = 'lenet' requires images of at least {MIN_SIDE}x{MIN_SIDE} pixels (got {height}x{width})"
        )
    # ReLU follows the pooling instead of preceding it: it commutes with the maximum and then has a quarter of the work.
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * _side_after(height) * _side_after(width), 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def _side_after(side: int) -> int:
    """Return the side of the feature maps after both convolutions (4 pixels less) and both poolings (half)."""
    return ((side - 4) // 2 - 4) // 2
