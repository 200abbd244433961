"""A character-level transformer and Shakespeare's largest roles: the task of tools/study_diloco.py."""

import math

import numpy as np
import torch
from torch import Tensor, nn

import keel
from keel.data.shakespeare import LENGTH, VOCABULARY, shakespeare
from keel.data.transforms import Tokens


def roles(*, workers: int = 20, windows: int = 400) -> keel.Dataset:
    """Windows of 80 characters, and the characters that follow each of them, of the roles with the most lines.

    Windows do not overlap, so that validation windows share no character with training windows.

    Args:
        workers: The number of roles.
        windows: The largest number of training windows of a role: its first ones.
    """
    whole = shakespeare()
    assert whole.keys is not None
    assert whole.test_keys is not None
    assert whole.rows is not None
    largest = np.argsort(-np.bincount(whole.keys), kind="stable")[:workers]
    train = [np.flatnonzero(whole.keys == role)[::LENGTH][:windows] for role in largest]
    test = [np.flatnonzero(whole.test_keys == role)[::LENGTH] for role in largest]
    return keel.Dataset(
        _sequences(whole.train[whole.rows[np.concatenate(train)]]),
        _sequences(whole.test[np.concatenate(test)]),
        len(VOCABULARY),
        keys=np.repeat(largest, [len(rows) for rows in train]),
        test_keys=np.repeat(largest, [len(rows) for rows in test]),
        transform=Tokens(),
        task="sequence",
    )


def _sequences(examples: keel.Examples) -> keel.Examples:
    """Windows whose target is the next character at every position, not after the last one alone."""
    after = torch.cat([examples.inputs[:, 1:], examples.targets[:, None]], dim=1)
    return keel.Examples(examples.inputs.contiguous(), after.long())


class Transformer(nn.Module):
    """A causal transformer with pre-normalisation; attention decays with distance (ALiBi, Press et al., 2022)."""

    def __init__(self, width: int = 32, layers: int = 1, heads: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, len(VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.blocks(self.embedding(tokens))))


class Block(nn.Module):
    """Causal self-attention and a perceptron, each with a residual connection."""

    bias: Tensor

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        position = torch.arange(LENGTH)
        distance = (position[:, None] - position).float()
        slopes = 0.25 ** torch.arange(heads)
        bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads) + self.bias
        return self.projection((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
