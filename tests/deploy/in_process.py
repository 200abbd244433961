"""A federation of three unequal sites in one process, and the same training with the engine `serial`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from torch import nn

from keel.core.examples import FederatedData
from keel.deploy.flower_adapter import InProcessGrid, ReplyFilter
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app
from keel.deploy.site_data import initial_model
from keel.deploy.watch import SiteLosses
from keel.runs.run import Run, run
from tests.conftest import uneven_data

SIZES = (9, 4, 14)
DATA = uneven_data(sizes=SIZES)
CONFIG: dict[str, Any] = {
    "rounds": 4,
    "local.epochs": 2,
    "local.batch": 4,
    "local.lr": 0.1,
    "local.weight_decay": 0.01,
    "participation.rate": 0.67,
    "evaluation.every": 1,
    "federation.sites": len(SIZES),
    # Replies are complete when a message has been pushed: only dropped replies wait for the timeout.
    "federation.timeout_seconds": 0.05,
    "federation.wait_seconds": 0.2,
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def site_examples(site: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(np.array(DATA.partition[site]))
    return DATA.train.inputs[rows], DATA.train.targets[rows]


def server_test_examples() -> tuple[torch.Tensor, torch.Tensor]:
    return DATA.test.inputs, DATA.test.targets


def keep_all(node: int, reply: Message) -> Message:
    return reply


class InProcessFederation:
    """Runs federations whose sites are calls of the client app. Node IDs are site numbers plus 1."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(
        self,
        reply_filter: ReplyFilter = keep_all,
        data: Callable[[Any], Any] = lambda node: site_examples(node["site"]),
        model: Callable[[], nn.Module] = network,
        test: Any = server_test_examples,
        out: str = "run",
        **config: Any,
    ) -> Run:
        """Run or resume a federation in the folder `out`; `participation__rate` sets `participation.rate`."""
        settings = {"federation.out": str(self.folder / out), **dotted(config)}
        spec, federation = read_settings({**CONFIG, **settings})
        nodes = [{"site": n, "state-dir": str(self.folder / f"site-{n}"), "device": "cpu"} for n in range(len(SIZES))]
        self.grid = InProcessGrid(client_app(model, data), nodes, reply_filter)
        return run_federation(self.grid, spec, federation, model, test)


def run_serial(path: Path, data: FederatedData = DATA, model: Callable[[], nn.Module] = network, **config: Any) -> Run:
    """Run the same training with the engine `serial`."""
    spec, _ = read_settings({**CONFIG, "federation.out": "-", **dotted(config)})
    table = spec.model_dump(exclude_none=True)
    settings = {**table, "engine": {"name": "serial"}}
    return run(settings, model=initial_model(model, spec), data=data, out=path, hooks=[SiteLosses()])


def dotted(config: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in config.items()}
