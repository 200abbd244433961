"""LSTMs that predict the next character (Shakespeare) or the next word (Stack Overflow).

Inputs are integer tokens of shape (batch, length); the number of classes is the size of the vocabulary.
"""

from torch import Tensor, nn

from keel.models.shapes import check_sequence
from keel.models.small import Width


def char_lstm(input_shape: tuple[int, ...], classes: int, *, embedding: Width = 8, hidden: Width = 100) -> nn.Module:
    """Two-layer LSTM of 100 units that predicts the character after a sequence (Li et al., 2020; Shakespeare)."""
    check_sequence("char_lstm", input_shape)
    return CharLSTM(classes, embedding, hidden)


def word_lstm(input_shape: tuple[int, ...], classes: int, *, embedding: Width = 96, hidden: Width = 670) -> nn.Module:
    """LSTM of 670 units that predicts the next word at every position (Reddi et al., 2021; Stack Overflow)."""
    check_sequence("word_lstm", input_shape)
    return WordLSTM(classes, embedding, hidden)


class CharLSTM(nn.Module):
    """Embedding, two LSTM layers, and a linear layer on the last state."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.output(states[:, -1])


class WordLSTM(nn.Module):
    """Embedding, one LSTM layer, a projection to the width of the embedding, and a linear layer at every position."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, embedding)
        self.output = nn.Linear(embedding, vocabulary)
        # PyTorch adds two biases where the equations have one. Without the second, the size is the published one.
        nn.init.zeros_(self.lstm.get_parameter("bias_hh_l0")).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.output(self.projection(states))
