"""What the tests of a federation share: three uneven sites as one Flower app, and the same ones as one data set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keel.data.federated import FederatedData
from keel.deploy.check import OneProcess, Post
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app, initial_model
from keel.runs.run import Run, run
from tests.conftest import uneven_data

SIZES = (9, 4, 14)
WHOLE = uneven_data(sizes=SIZES)
CONFIG: dict[str, Any] = {
    "rounds": 4,
    "local.epochs": 2,
    "local.batch": 4,
    "local.lr": 0.1,
    "local.weight_decay": 0.01,
    "participation.rate": 0.67,
    "evaluation.every": 1,
    "federation.sites": len(SIZES),
    "federation.timeout": 0.3,
    "federation.wait": 1.0,
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def held_by(site: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(np.array(WHOLE.partition[site]))
    return WHOLE.train.inputs[rows], WHOLE.train.targets[rows]


def tested() -> tuple[torch.Tensor, torch.Tensor]:
    return WHOLE.test.inputs, WHOLE.test.targets


class InOneProcess:
    """A federation whose sites are functions."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(
        self,
        post: Post = lambda node, reply: reply,
        data: Callable[[Any], Any] = lambda node: held_by(node["site"]),
        model: Callable[[], nn.Module] = network,
        test: Any = tested,
        out: str = "run",
        **config: Any,
    ) -> Run:
        settings = {key.replace("__", "."): value for key, value in config.items()}
        spec, federation = read_settings({**CONFIG, "federation.out": str(self.folder / out), **settings})
        nodes = [{"site": n, "memory": str(self.folder / f"site-{n}"), "device": "cpu"} for n in range(len(SIZES))]
        self.grid = OneProcess(client_app(model, data), nodes, post)
        return run_federation(self.grid, spec, federation, model, test)


def serial(path: Path, data: FederatedData = WHOLE, model: Callable[[], nn.Module] = network, **config: Any) -> Run:
    """The same training on one machine."""
    settings = {key.replace("__", "."): value for key, value in config.items()}
    spec, _ = read_settings({**CONFIG, "federation.out": "-", **settings})
    table = spec.model_dump(exclude_none=True)
    return run({**table, "engine": {"name": "serial"}}, model=initial_model(model, spec), data=data, out=path)
