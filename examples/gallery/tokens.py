"""Text as tokens: integers stay integers, so that an embedding takes them; one client per author."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
author = np.repeat(np.arange(40), 30)
topic = author % 4  # every author writes about one of four topics
tokens = rng.integers(0, 100, (1200, 16))
tokens[:, ::4] = 25 * topic[:, None] + rng.integers(0, 25, (1200, 4))  # some words belong to the topic


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 16), nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


torch.manual_seed(0)
test = rng.random(1200) < 0.2
data = keel.federate(tokens[~test], topic[~test], keys=author[~test], test=(tokens[test], topic[test]))
spec = {"algorithm": {"name": "ghbm"}, "rounds": 100, "local": {"epochs": 1, "batch": 8, "lr": 0.5}}
run = keel.run(spec, model=BagOfWords(), data=data, metrics=["accuracy", "f1"])
print(f"accuracy {run.accuracy:.3f}, F1 {run.records[-1]['f1']:.3f}")
