"""Models as a user writes them: classes with a `forward`, which every framework trains.

LeNet and ResNet-20 are as published; Keel's built-in versions compute the same functions with fewer operations.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d, pad, relu, scaled_dot_product_attention


class MLP(nn.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, classes: int):
        super().__init__()
        self.hidden, self.output = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(relu(self.hidden(x)))


class LayerNormMLP(nn.Module):
    """The same with layer normalisation and GELU."""

    def __init__(self, classes: int):
        super().__init__()
        self.hidden, self.norm, self.output = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(gelu(self.norm(self.hidden(x))))


class SmallCNN(nn.Module):
    """Two convolutions on images of 8x8 pixels."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.output = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv1(x)), 2)
        return self.output(max_pool2d(relu(self.conv2(x)), 2).flatten(1))


class LeNet(nn.Module):
    """The CNN of Hsu et al. (2020) for CIFAR."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5)
        self.dense1, self.dense2, self.output = nn.Linear(1600, 384), nn.Linear(384, 192), nn.Linear(192, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2).flatten(1)
        return self.output(relu(self.dense2(relu(self.dense1(x)))))


class CharLSTM(nn.Module):
    """The two-layer LSTM of Li et al. (2020) for Shakespeare."""

    def __init__(self, classes: int):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(classes, 8), nn.LSTM(8, 100, num_layers=2, batch_first=True)
        self.output = nn.Linear(100, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(tokens))[0][:, -1])


class Layer(nn.Module):
    """A layer of a transformer: attention, then a perceptron, each after a normalisation."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.parts, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.parts(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two layers on sequences of 16 tokens; classifies a sequence."""

    def __init__(self, classes: int, width: int = 32, heads: int = 4, length: int = 16, vocabulary: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(Layer(width, heads), Layer(width, heads))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.layers(self.embedding(tokens) + self.positions)).mean(1))


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
