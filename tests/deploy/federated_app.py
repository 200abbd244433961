"""The app of the end-to-end tests. They copy this file into the folder of a new federation.

Its server trains with three algorithms one after the other: FedHBM, whose clients have state, MimeMom, whose rounds
have two phases, and FedAvg, which is evaluated on the sites. A site with the setting `malicious` attacks the last two.
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
    "fedavg": {"rounds": 1, "participation.rate": 1.0},
}
CLAIMED = 10**6
"""What a malicious site claims to have evaluated, all of it correct."""


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
    data = inputs[site == node["site"]], labels[site == node["site"]]
    return data, data


def server_test():
    return all_examples()[1:]


def server_tests(method):
    """Return the test examples of the server; None for the method that is evaluated on the sites."""
    return None if method == "fedavg" else server_test


valid_client = client_app(model, site_data)
client = ClientApp()
server = ServerApp()


def answer(message, context):
    """Answer as Keel does. A malicious site replaces what it sends with MimeMom and FedAvg: see `forge`.

    While the federation's folder has a file for this site and round, wait: the tests kill processes meanwhile.
    """
    folder = Path(context.node_config["state-dir"]).parents[1]
    while (folder / f"hold-{context.node_config['site']}-{message.metadata.group_id}").exists():
        time.sleep(0.05)
    reply = valid_client(message, context)
    if context.node_config.get("malicious"):
        forge(reply, tomllib.loads(message.content.config_records[messages.REQUEST]["spec"])["algorithm"]["name"])
    return reply


def forge(reply, algorithm):
    """Make all tensors NaN with MimeMom. With FedAvg, multiply them by -1000 and claim a perfect evaluation."""
    factor = {"mimemom": np.nan, "fedavg": -1000.0}.get(algorithm, 1.0)
    for tensors in reply.content.array_records.values():
        for name, array in tensors.items():
            forged = factor * np.frombuffer(array.data, np.float32)
            tensors[name] = Array(array.dtype, array.shape, array.stype, forged.astype(np.float32).tobytes())
    if algorithm == "fedavg" and reply.metadata.message_type == "evaluate":
        claim = {"loss": 0.0, "correct": CLAIMED, "labelled": CLAIMED, "examples": CLAIMED}
        reply.content.metric_records[messages.REPLY].update(claim)


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
        run_federation(grid, spec, federation, model, server_tests(name), announce=announce)
