"""Your own metric: a function of all outputs and targets, by which runs are then compared and stopped."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
risk = rng.normal(size=(1500, 6))
ill = (risk[:, 0] + rng.normal(size=1500) > 1.2).astype(int)


def sensitivity_at_20(outputs, targets):
    """The share of the ill among the fifth of all patients with the highest scores."""
    highest = (outputs[:, 1] - outputs[:, 0]).topk(len(targets) // 5).indices
    return (targets[highest] == 1).sum() / (targets == 1).sum()


sensitivity_at_20.higher_is_better = True

torch.manual_seed(0)
data = keel.federate(risk[:1200], ill[:1200], clients=30, alpha=0.5, test=(risk[1200:], ill[1200:]))
spec = {"algorithm": {"name": "ghbm"}, "rounds": 30, "local": {"epochs": 1, "batch": 10, "lr": 0.1}}
run = keel.run(spec, model=nn.Linear(6, 2), data=data, metrics=[sensitivity_at_20, "auroc"])
print(f"sensitivity {run.summary['value']:.3f}, accuracy {run.accuracy:.3f}")
