"""Early stopping on held-out examples, and the best model of the run."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
inputs = rng.normal(size=(600, 10))
label = (inputs[:, :2].sum(1) + rng.normal(scale=0.5, size=600) > 0).astype(int)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
data = keel.federate(inputs, label, clients=20, test=(inputs, label))
spec = {
    "algorithm": {"name": "fedhbm"},
    "rounds": 500,
    "local": {"epochs": 2, "batch": 8, "lr": 0.1},
    "evaluation": {"on": "validation", "every": 2, "last": 1, "select": True},
    "stop": {"patience": 10},
}
run = keel.run(spec, model=model, data=data)
print(f"{run.status} after {run.summary['rounds']} rounds: {run.summary['stop_reason']}")
print(f"best: round {run.summary['best_round']}, accuracy {run.summary['best_value']:.3f}")
