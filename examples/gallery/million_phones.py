"""A million phones: 20 train in each round, few ever return. What client state costs, announced before the run."""

import numpy as np
import torch
from torch import nn

import keel
from keel.algorithms.fedavg import FedAvg
from keel.algorithms.fedhbm import FedHBM
from keel.algorithms.ghbm import GHBM

PHONES, COHORT = 1_000_000, 20

rng = np.random.default_rng(0)
phone = np.repeat(np.arange(PHONES), 2)  # two examples per phone, both of one class
label = rng.integers(0, 10, PHONES)[phone]
inputs = rng.standard_normal((len(phone), 16), dtype="float32")
inputs[np.arange(len(phone)), label] += 3
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
data = keel.federate(inputs[2000:], label[2000:], keys=phone[2000:], test=(inputs[:2000], label[:2000]))
spec = {"rounds": 100, "local": {"epochs": 5, "batch": 2, "lr": 0.03}, "participation": {"rate": COHORT / PHONES}}
for algorithm in (FedAvg(), GHBM(tau=20), FedHBM()):
    print(f"{algorithm.title}: ", end="")
    run = keel.run(spec, algorithm=algorithm, model=model, data=data, announce=print)
    spent = run.summary["bytes_down"] + run.summary["bytes_up"]
    print(f"  accuracy {run.accuracy:.1%}, {spent / 1e6:.1f} MB sent in {len(run.records)} rounds")
