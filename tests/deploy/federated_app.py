"""The app of the end-to-end tests. It is copied into a folder of its own, and its server trains by several methods."""

from pathlib import Path

import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp
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
    return inputs[mine], labels[mine]


def test():
    return whole()[1:]


honest = client_app(model, site_data)
client = ClientApp()
server = ServerApp()


def answer(message, context):
    """As Keel answers, but that the report is NaN as long as the file is there that the node's settings name."""
    reply = honest(message, context)
    if "spoil" in context.node_config and Path(context.node_config["spoil"]).exists():
        for tensors in reply.content.array_records.values():
            for name, array in tensors.items():
                nan = np.full(array.shape, np.nan, dtype=np.float32)
                tensors[name] = Array(array.dtype, array.shape, array.stype, nan.tobytes())
    return reply


for register in (client.query(), client.train("probe"), client.train(), client.evaluate()):
    register(answer)


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
