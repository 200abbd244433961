"""ResNet-20 for CIFAR (He et al. 2015, section 4.2) with group normalisation, after Idelbayev's implementation."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from keel.models.shapes import image

GROUPS = 2
WIDTHS = (16, 32, 64)
BLOCKS = 3
"""Of each width; 3 widths of 3 blocks of 2 convolutions, the first convolution and the last layer make 20."""


def resnet20(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-20 for small images, with group normalisation of two groups in place of batch normalisation."""
    channels, _, _ = image("resnet20", input_shape)
    layers: list[nn.Module] = [_convolution(channels, WIDTHS[0], 1), nn.GroupNorm(GROUPS, WIDTHS[0]), nn.ReLU()]
    for inputs, outputs in pairwise((WIDTHS[0], *WIDTHS)):
        layers.append(Block(inputs, outputs))
        layers += [Block(outputs, outputs) for _ in range(BLOCKS - 1)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return network


class Block(nn.Module):
    """Two convolutions beside a shortcut without parameters; one that widens also halves the height and width."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.added = outputs - inputs
        self.conv1 = _convolution(inputs, outputs, 2 if self.added else 1)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = _convolution(outputs, outputs, 1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """He et al.'s option A: every second pixel, and channels of zeros (Idelbayev: half of them on each side)."""
        if not self.added:
            return x
        return pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added // 2, self.added // 2))


def _convolution(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
