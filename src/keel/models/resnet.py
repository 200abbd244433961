"""ResNet-20 for CIFAR (He et al., 2015, section 4.2) with group normalisation, after Idelbayev's implementation."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from keel.models.shapes import image

GROUPS = 2
WIDTHS = (16, 32, 64)
BLOCKS = 3
"""Blocks per width: 3 widths x 3 blocks x 2 convolutions, the first convolution and the last layer are 20 layers."""


def resnet20(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-20 for small images, with group normalisation (two groups) instead of batch normalisation."""
    channels, _, _ = image("resnet20", input_shape)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, WIDTHS[0]),
        nn.ReLU(inplace=True),
    ]
    for inputs, outputs in pairwise((WIDTHS[0], *WIDTHS)):
        layers += [Block(inputs, outputs), *(Block(outputs, outputs) for _ in range(BLOCKS - 1))]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return network


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters. A block that adds channels also halves height and width."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.added_channels = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2 if self.added_channels else 1, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
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
