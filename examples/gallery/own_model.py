"""Compare two algorithms on your model and your data."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
hospital = np.repeat(np.arange(30), 20)  # thirty clients, each with examples of one of ten classes
label = hospital % 10
inputs = rng.normal(size=(600, 16)) + 2.5 * np.eye(10, 16)[label]
test = rng.random(600) < 0.3

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))
data = keel.federate(inputs[~test], label[~test], keys=hospital[~test], test=(inputs[test], label[test]))
settings = {"rounds": 40, "local": {"epochs": 2, "batch": 8, "lr": 0.1}, "evaluation": {"last": 10}}

for name in ("fedavg", "fedhbm"):
    run = keel.run({**settings, "algorithm": {"name": name}}, model=model, data=data)
    print(f"{name}: accuracy {run.accuracy:.3f}, run folder {run.path}")
