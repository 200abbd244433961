"""The app of the end-to-end tests. They copy this file into the folder of a new federation.

Its server trains with two algorithms one after the other: FedHBM, whose clients have state, and MimeMom, whose rounds
have two phases.
"""

import time
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from keel.deploy import client_app, messages
from keel.deploy.reply_limit import announce_reply_size
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings

SIZES = (9, 4, 14)
METHODS = {
    "fedhbm": {"rounds": 3, "federation.min_replies": 2},
    "mimemom": {"rounds": 1, "federation.min_replies": 1},
}


def model():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def all_examples():
    """Return sites, inputs and labels of all examples. The sites differ in size and label distribution."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(len(SIZES)), SIZES)
    labels = (site + rng.integers(0, 2, len(site))) % 3
    return site, rng.normal(size=(len(site), 5)) + labels[:, None] + 0.3 * site[:, None], labels


def site_data(node):
    site, inputs, labels = all_examples()
    return inputs[site == node["site"]], labels[site == node["site"]]


def server_test():
    return all_examples()[1:]


valid_client = client_app(model, site_data)
client = ClientApp()
server = ServerApp()


def answer(message, context):
    """Answer as Keel does, but replace the tensors by NaN if the node's setting `spoil` names the algorithm.

    While the federation's folder has a file for this site and round, wait: the tests kill processes meanwhile.
    """
    folder = Path(context.node_config["state-dir"]).parents[1]
    while (folder / f"hold-{context.node_config['site']}-{message.metadata.group_id}").exists():
        time.sleep(0.05)
    reply = valid_client(message, context)
    spec = tomllib.loads(message.content.config_records[messages.REQUEST]["spec"])
    if context.node_config.get("spoil") == spec["algorithm"]["name"]:
        for tensors in reply.content.array_records.values():
            for name, array in tensors.items():
                nan = np.full(array.shape, np.nan, dtype=np.float32)
                tensors[name] = Array(array.dtype, array.shape, array.stype, nan.tobytes())
    return reply


for register in (client.query(), client.train("probe"), client.train(), client.evaluate()):
    register(answer)


def method_config(config, name, out):
    """Return the configuration of one of the methods."""
    return {**config, **METHODS[name], "algorithm.name": name, "federation.out": f"{out}/{name}"}


@server.main()
def main(grid, context):
    config = dict(context.run_config)
    for name in METHODS:
        spec, federation = read_settings(method_config(config, name, config["federation.out"]))
        announce = partial(announce_reply_size, context.run_id)
        run_federation(grid, spec, federation, model, server_test, announce=announce)
