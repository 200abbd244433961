"""Regression on a table: floats as targets, evaluated by the mean absolute error."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
hospital = np.repeat(np.arange(20), 50)
age, dose = rng.uniform(20, 90, 1000), rng.normal(size=1000) + hospital / 10
stay = 2 + 0.05 * age + 1.5 * dose + rng.normal(scale=0.3, size=1000)  # days
table = np.stack([(age - 55) / 20, dose], 1)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
test = rng.random(1000) < 0.2
data = keel.federate(table[~test], stay[~test], keys=hospital[~test], test=(table[test], stay[test]))
spec = {"algorithm": {"name": "ghbm"}, "rounds": 60, "local": {"epochs": 1, "batch": 10, "lr": 0.02}}
run = keel.run(spec, model=model, data=data, metrics=["mae", "r2"])
print(f"mean absolute error {run.summary['value']:.2f} days, R2 {run.records[-1]['r2']:.2f}")
