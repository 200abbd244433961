"""Several labels per example: rows of 0 and 1 as targets, evaluated by the area under the ROC curve."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
findings = rng.normal(size=(1000, 12))
weights = rng.normal(size=(12, 5))
diagnoses = (findings @ weights + rng.normal(size=(1000, 5)) > 1).astype(int)  # each holds or does not

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
data = keel.federate(findings[:800], diagnoses[:800], clients=20, test=(findings[800:], diagnoses[800:]))
spec = {"algorithm": {"name": "fedhbm"}, "rounds": 40, "local": {"epochs": 1, "batch": 10, "lr": 0.1}}
run = keel.run(spec, model=model, data=data, metrics=["auroc", "f1"])
print(f"AUROC {run.summary['value']:.3f}, F1 {run.records[-1]['f1']:.3f}")
