"""A search over an own model from Python: the best learning rate, and then a comparison of methods with it."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
inputs = rng.normal(size=(1200, 10))
label = (inputs[:, :3] ** 2).sum(1).astype(int).clip(0, 3)


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


data = keel.federate(inputs[:1000], label[:1000], clients=20, alpha=1.0, test=(inputs[1000:], label[1000:]))
spec = {"rounds": 40, "local": {"epochs": 1, "batch": 10}, "evaluation": {"every": 5}}
search = keel.sweep({"local.lr": [0.03, 0.1, 0.3]}, spec=spec, algorithm="fedhbm", seeds=2, model=model, data=data)
print(search.best.fields)
tuned = {**spec, "local": {**spec["local"], "lr": search.best.fields["local.lr"]}}
methods = keel.compare(["fedavg", "fedhbm"], seeds=2, spec=tuned, model=model, data=data)
print(methods.to_markdown())
