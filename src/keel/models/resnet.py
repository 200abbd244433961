"""ResNet-20 for CIFAR (He et al., 2015, section 4.2) with group normalisation, after Idelbayev's implementation."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from keel.models.fourier import convolution
from keel.models.shapes import image

GROUPS = 2
WIDTHS = (16, 32, 64)
BLOCKS = 3
"""Blocks per width: 3 widths x 3 blocks x 2 convolutions, the first convolution and the last layer are 20 layers."""


def resnet20(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-20 for small images, with group normalisation (two groups) instead of batch normalisation."""
    channels, height, width = image("resnet20", input_shape)
    size = (height, width)
    layers: list[nn.Module] = [
        _same_size(channels, WIDTHS[0], size),
        nn.GroupNorm(GROUPS, WIDTHS[0]),
        nn.ReLU(inplace=True),
    ]
    for inputs, outputs in pairwise((WIDTHS[0], *WIDTHS)):
        layers.append(first := Block(inputs, outputs, size))
        size = first.size
        layers += [Block(outputs, outputs, size) for _ in range(BLOCKS - 1)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return network


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters. A block that adds channels also halves height and width."""

    def __init__(self, inputs: int, outputs: int, size: tuple[int, int]):
        super().__init__()
        self.added_channels = outputs - inputs
        if self.added_channels:
            self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, padding=1, bias=False)
            size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
        else:
            self.conv1 = _same_size(inputs, outputs, size)
        self.size = size  # of the output
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = _same_size(outputs, outputs, size)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu_()
        return self.norm2(self.conv2(inner)).add_(self._shortcut(x)).relu_()

    def _shortcut(self, x: Tensor) -> Tensor:
        """Return option A of He et al.: every second pixel, and channels of zeros (Idelbayev: half on each side)."""
        if not self.added_channels:
            return x
        # A mean over one pixel, because the gradient of x[:, :, ::2, ::2] does not keep the memory format of x.
        half = self.added_channels // 2
        return pad(avg_pool2d(x, 1, 2), (0, 0, 0, 0, half, half))


def _same_size(inputs: int, outputs: int, size: tuple[int, int]) -> nn.Conv2d:
    """Return a 3x3 convolution that keeps height and width."""
    return convolution(inputs, outputs, 3, size, padding=1, bias=False)
