"""The LeNet-like network of Hsu et al. 2020 (Federated Visual Classification), the paper's main model on CIFAR."""

from torch import nn

from keel.errors import KeelError
from keel.models.fourier import convolution
from keel.models.shapes import image

SMALLEST = 16
"""The side that leaves one pixel after both convolutions and both poolings."""


def lenet(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64 channels with max-pooling, then fully connected layers of 384 and 192."""
    channels, height, width = image("lenet", input_shape)
    if min(height, width) < SMALLEST:
        raise KeelError(f"model: lenet needs images of at least {SMALLEST}x{SMALLEST} pixels, not {height}x{width}")
    # ReLU after the pooling, not before it: the largest of four commutes with it, and a quarter of the work is left.
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        convolution(64, 64, 5, ((height - 4) // 2, (width - 4) // 2)),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * _left(height) * _left(width), 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def _left(side: int) -> int:
    """What both convolutions (4 pixels each) and both poolings (half each) leave of a side."""
    return ((side - 4) // 2 - 4) // 2
