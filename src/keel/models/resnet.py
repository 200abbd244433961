"""ResNet-20 for CIFAR (He et al. 2015, section 4.2) with group normalisation, after Idelbayev's implementation."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from keel.models.fourier import convolution
from keel.models.shapes import image

GROUPS = 2
WIDTHS = (16, 32, 64)
BLOCKS = 3
"""Of each width; 3 widths of 3 blocks of 2 convolutions, the first convolution and the last layer make 20."""


def resnet20(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-20 for small images, with group normalisation of two groups in place of batch normalisation."""
    channels, height, width = image("resnet20", input_shape)
    size = (height, width)
    layers: list[nn.Module] = [_same(channels, WIDTHS[0], size), nn.GroupNorm(GROUPS, WIDTHS[0]), nn.ReLU(inplace=True)]
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
    """Two convolutions beside a shortcut without parameters; one that widens also halves the height and width."""

    def __init__(self, inputs: int, outputs: int, size: tuple[int, int]):
        super().__init__()
        self.added = outputs - inputs
        if self.added:
            self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, padding=1, bias=False)
            size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
        else:
            self.conv1 = _same(inputs, outputs, size)
        self.size = size  # of what it gives
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = _same(outputs, outputs, size)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu_()
        return self.norm2(self.conv2(inner)).add_(self._shortcut(x)).relu_()

    def _shortcut(self, x: Tensor) -> Tensor:
        """He et al.'s option A: every second pixel, and channels of zeros (Idelbayev: half of them on each side)."""
        if not self.added:
            return x
        # A mean over one pixel: unlike x[:, :, ::2, ::2] its gradient keeps the memory layout of x.
        return pad(avg_pool2d(x, 1, 2), (0, 0, 0, 0, self.added // 2, self.added // 2))


def _same(inputs: int, outputs: int, size: tuple[int, int]) -> nn.Conv2d:
    return convolution(inputs, outputs, 3, size, padding=1, bias=False)
