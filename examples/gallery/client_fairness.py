"""How unequal clients fare: each is evaluated on its own held-out examples, before and after fine-tuning."""

import numpy as np
import torch
from torch import nn

import keel

rng = np.random.default_rng(0)
client = np.repeat(np.arange(50), 40)
shift = rng.normal(size=(50, 8))[client]  # every client has its own shift of the inputs
inputs = rng.normal(size=(2000, 8))
label = ((inputs[:, 0] + 0.8 * shift[:, 1]) > 0).astype(int)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
data = keel.federate(inputs + shift, label, keys=client, test=(inputs + shift, label))
spec = {"algorithm": {"name": "fedhbm"}, "rounds": 30, "local": {"epochs": 1, "batch": 8, "lr": 0.1}}
for steps in (None, 20):
    evaluation = {"every": 30, "last": 1, "clients": 50, "finetune_steps": steps}
    clients = keel.run({**spec, "evaluation": evaluation}, model=model, data=data).records[-1]["clients"]
    print(f"fine-tuning steps {steps or 0}: mean {clients['mean']:.3f}, worst decile {clients['worst_decile']:.3f}")
