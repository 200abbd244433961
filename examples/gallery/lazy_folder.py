"""A folder of image files that are read when a client trains on them, by a torch.utils.data.Dataset."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import keel

folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
patterns = rng.normal(size=(3, 1, 8, 8))
for number in range(600):  # files such as 000123-2.npy: a number and a class
    np.save(folder / f"{number:06}-{number % 3}", patterns[number % 3] + rng.normal(size=(1, 8, 8)))


class Images(torch.utils.data.Dataset):
    def __init__(self, files):
        self.files, self.targets = files, [int(file.stem[-1]) for file in files]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.from_numpy(np.load(self.files[index])), self.targets[index]


files, model = sorted(folder.iterdir()), nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
data = keel.federate(Images(files[:500]), test=Images(files[500:]), clients=20, partition="iid")
print(keel.run({"rounds": 20, "local": {"epochs": 1, "batch": 8, "lr": 0.01}}, model=model, data=data).accuracy)
