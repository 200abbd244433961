"""The app of the end-to-end tests. It is copied into a folder of its own, and its server trains by several methods."""

from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp
from torch import nn

from keel.deploy import client_app
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings

SIZES = (9, 4, 14)


def model():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def whole():
    """Three sites of unequal size with unequal label mixes: who holds each example, the inputs, the labels."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(len(SIZES)), SIZES)
    labels = (site + rng.integers(0, 2, len(site))) % 3
    return site, rng.normal(size=(len(site), 5)) + labels[:, None] + 0.3 * site[:, None], labels


def site_data(node):
    site, inputs, labels = whole()
    mine = site == node["site"]
    spoiled = "spoil" in node and Path(node["spoil"]).exists()
    return inputs[mine] * (1e30 if spoiled else 1.0), labels[mine]


def test():
    return whole()[1:]


client = client_app(model, site_data)
server = ServerApp()


@server.main()
def main(grid, context):
    rounds = {"fedhbm": 3, "scaffold": 2, "mimemom": 2, "ghbm": 3}
    config = dict(context.run_config)
    methods, out, tau = config.pop("methods").split(","), config.pop("federation.out"), config.pop("algorithm.tau")
    for name in methods:
        own = {"algorithm.name": name, "federation.out": f"{out}/{name}", "rounds": rounds[name]}
        own |= {"algorithm.tau": tau} if name == "ghbm" else {}
        spec, federation = read_settings({**config, **own})
        run_federation(grid, spec, federation, model, test)
