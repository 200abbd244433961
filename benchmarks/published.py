"""LeNet and ResNet-20 as published. Keel's versions compute the same function with fewer operations."""

from torch import Tensor, nn
from torch.nn.functional import pad, relu


def lenet(classes: int) -> nn.Module:
    """The CNN of Hsu et al. (2020) for CIFAR."""
    pooled = [nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    dense = [nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, classes)]
    return nn.Sequential(*pooled, nn.Flatten(), *dense)


def resnet20(classes: int) -> nn.Module:
    """The ResNet-20 of He et al. (2015) for CIFAR, with GroupNorm."""
    blocks = [Block(16, 16), Block(16, 16), Block(16, 16), Block(16, 32), Block(32, 32), Block(32, 32)]
    blocks += [Block(32, 64), Block(64, 64), Block(64, 64)]
    first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(2, 16), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.added = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2 if self.added else 1, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        if self.added:
            x = pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return relu(inner + x)
