"""Images with your own model: a class with `forward`, in batches of (examples, channels, height, width)."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
patterns = rng.normal(size=(10, 1, 12, 12))
labels = rng.integers(0, 10, 2000)
images = (patterns[labels] + rng.normal(size=(2000, 1, 12, 12))).astype(np.float32)


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


torch.manual_seed(0)
data = keel.federate(images[:1600], labels[:1600], clients=50, alpha=0.5, test=(images[1600:], labels[1600:]))
spec = {"algorithm": {"name": "fedhbm"}, "rounds": 20, "local": {"epochs": 1, "batch": 16, "lr": 0.05}}
run = keel.run(spec, model=SmallCNN(), data=data)
print(f"accuracy {run.accuracy:.3f}, engine {run.summary['engine']}")
