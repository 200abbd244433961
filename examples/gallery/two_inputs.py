"""A model with two inputs by name, as Hugging Face's models have: tokens and a mask of their padding."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
mask = (np.arange(12) < rng.integers(3, 12, (1500, 1))).astype(int)
ids = rng.integers(1, 50, (1500, 12)) * mask
label = (ids.sum(1) / mask.sum(1) > 25).astype(int)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask / attention_mask.sum(1, keepdim=True)
        return {"logits": self.head((self.embedding(input_ids) * weights[:, :, None]).sum(1))}


torch.manual_seed(0)
inputs, test = ({"input_ids": ids[rows], "attention_mask": mask[rows]} for rows in (slice(1200), slice(1200, None)))
data = keel.federate(inputs, label[:1200], clients=40, alpha=0.5, test=(test, label[1200:]))
spec = {"algorithm": {"name": "fedhbm"}, "rounds": 40, "local": {"epochs": 2, "batch": 10, "lr": 0.5}}
run = keel.run(spec, model=Classifier(), data=data)
print(f"accuracy {run.accuracy:.3f}")
