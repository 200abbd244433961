"""Sequences of different lengths, padded for each minibatch by a collate function."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import keel


def reviews(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for length in torch.randint(3, 15, (count,), generator=generator).tolist():
        yield torch.randint(1, 20, (length,), generator=generator) + 10 * (length % 2), length % 2


def pad(items):
    return pad_sequence([text for text, _ in items], batch_first=True), torch.tensor([label for _, label in items])


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).sum(1) / (tokens > 0).sum(1, keepdim=True))


data = keel.federate(list(reviews(600, 0)), test=list(reviews(200, 1)), clients=20, partition="iid", collate=pad)
print(keel.run({"rounds": 20, "local": {"epochs": 1, "batch": 8, "lr": 0.5}}, model=Mean(), data=data).accuracy)
