"""The server and a site of a small federation in this process, each called with damaged messages.

Each function makes a valid message, damages it with `damage` and passes it to the code that validates it. It returns
None, or one line that says what the code did wrong.
"""

import re
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from keel.algorithms.base import Context
from keel.core.client import ClientResult
from keel.core.flat_model import state_fingerprint
from keel.deploy import KeelStrategy, keel_mod, messages
from keel.deploy.descriptions import Description, read_description
from keel.deploy.engine import FlowerEngine
from keel.deploy.federation_task import federation_task
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.invalid_reply import InvalidReply
from keel.deploy.model_arrays import split_into_arrays
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app
from keel.deploy.site_data import initial_model
from keel.deploy.sites import Sites
from keel.deploy.versions import installed_versions
from keel.engines import Dropped, RoundWork
from keel.errors import KeelError
from keel.runs.build import build

Damage = Callable[[RecordDict], RecordDict]

TRAINING = "0123456789abcdef" * 2
ROUND = Context(round=1, clients=1, cohort=1, share=1.0, period=1.0, lr=0.1, server_lr=1.0)
SPEC, FEDERATION = read_settings(
    {"algorithm.name": "scaffold", "rounds": 2, "local.batch": 4, "local.epochs": 1, "local.lr": 0.1}
    | {"federation.sites": 1, "federation.out": "-", "federation.timeout_seconds": 0.001}
)
POLICY = {
    **{
        "study": "s",
        "expires": date(9999, 1, 1),
        "algorithms": ["scaffold"],
        "evaluation": True,
    },
    **dict.fromkeys(("min_batch", "min_steps", "min_examples", "min_test_examples"), 1),
    **dict.fromkeys(("max_rounds", "max_reports", "timeout_seconds", "max_reply_mb", "retention_days"), 1000),
    "max_memory_mb": 2**20,
}
SIZE = 39


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def examples(node: Any = None) -> Any:
    inputs, labels = torch.arange(40.0).reshape(8, 5) / 40, torch.arange(8) % 3
    return (inputs, labels), (inputs[:4], labels[:4])


class DamagedGrid:
    """A grid whose only reply is the damaged content."""

    content: Callable[[], RecordDict]

    def get_node_ids(self) -> list[int]:
        return [1]

    def pull_messages(self, ids: Any) -> list[Any]:
        return [SimpleNamespace(has_error=lambda: False, content=self.content())]


@cache
def description() -> Description:
    return {
        **{"site": 0, "examples": 8, "test_examples": 4, "classes": 3, "shape": [5], "target_shape": [], "moving": []},
        **{"model": state_fingerprint(initial_model(network, SPEC)), "fingerprint": "0" * 64, "app": ""},
        **installed_versions(),
    }


@cache
def server() -> tuple[Sites, FlowerEngine]:
    """The server's view of the sites, and its engine, whose requests are answered by the damaged reply."""
    sites = Sites(DamagedGrid(), FEDERATION, {"training": TRAINING})  # type: ignore[arg-type]
    engines: list[FlowerEngine] = []

    def make_engine(workload: Any, workers: Any) -> FlowerEngine:
        engines.append(FlowerEngine(workload, SPEC, sites, evaluate_on_server=False))
        return engines[0]

    described = {**description(), "node": 1, "joined": 0}
    sites.recorded[0] = described
    build(SPEC, federation_task(SPEC, initial_model(network, SPEC), [described], None, None), engine=make_engine)

    def request_replies(kind: str, round: int, requests: Any, tensors: Any, bounds: messages.ReplyBounds) -> Any:
        return {site: sites._pull_reply("1", bounds) for site in requests}

    vars(sites).update(request_replies=request_replies, identify_nodes=lambda: None)
    vars(sites)["federation"] = SimpleNamespace(**{**vars(FEDERATION), "min_replies": 0}, left_sites=frozenset())
    return sites, engines[0]


def origin() -> ConfigRecord:
    return ConfigRecord({"training": TRAINING, "round": 1})


def train(folder: Path, rng: Random, damage: Damage) -> str | None:
    """A report of a site to the server."""
    sites, engine = server()
    report = {name: torch.zeros(shape) for name, (shape, _) in engine.report_signature.items()}
    numbers = MetricRecord({"steps": 2, "loss": 0.5, "state_lost": 0})
    content = {messages.TENSORS: messages.pack(report), messages.REPLY: numbers, messages.REQUEST: origin()}
    vars(sites.grid)["content"] = lambda: damage(RecordDict(content))
    work = RoundWork(np.array([0]), {"theta": torch.zeros(SIZE), "c": torch.zeros(SIZE)}, [{}], ROUND, [None])
    for result in engine.train(work):
        if isinstance(result, ClientResult):
            finite = all(torch.isfinite(tensor).all() for tensor in result.message.values())
            if not finite or result.steps != 2 or not 0 <= float(result.loss) <= messages.MAX_LOSS:
                return f"accepted {result}"
    return None


def evaluate(folder: Path, rng: Random, damage: Damage) -> str | None:
    """A measurement of a site."""
    sites, engine = server()
    engine._round = 1
    numbers = MetricRecord({"loss": 1.0, "correct": 2, "labelled": 4, "examples": 4})
    content = {messages.REPLY: numbers, messages.REQUEST: origin(), messages.TENSORS: messages.pack({})}
    vars(sites.grid)["content"] = lambda: damage(RecordDict(content))
    for sums in engine.measure(torch.zeros(SIZE), None):
        if not (torch.isfinite(sums).all() and 0 <= sums[1] <= sums[2] <= 4 == sums[3]):
            return f"accepted {sums.tolist()}"
    return None


def describe(folder: Path, rng: Random, damage: Damage) -> str | None:
    """The description of a site, which joins."""
    sites, _ = server()
    vars(sites.grid)["content"] = lambda: damage(RecordDict({messages.REPLY: ConfigRecord(description())}))
    sites.nodes.clear()
    sites.descriptions.clear()
    reply = sites._pull_reply("1", messages.ReplyBounds())
    try:
        sites._bind(1, reply if reply is not None else Dropped("none"), {1})
    except InvalidReply:
        return None
    joined = sites.descriptions[0]
    return None if read_description(reply) == {k: v for k, v in joined.items() if k != "node"} else f"joined {joined}"


@cache
def keel_strategy() -> KeelStrategy:
    made = KeelStrategy("scaffold", lr=0.1, min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=1)
    arrays = split_into_arrays(torch.zeros(SIZE), {"a": (30,), "b": (9,)})
    InProcessGrid(client_app(network, examples), [{}])  # sets what Flower's messages require
    [request] = made.configure_train(1, arrays, ConfigRecord(), DamagedGrid())  # type: ignore[arg-type]
    vars(made)["request"] = request.content
    return made


def strategy(folder: Path, rng: Random, damage: Damage) -> str | None:
    """A reply of a node to the server of another Flower app."""
    made = keel_strategy()
    report = {name: torch.zeros(shape) for name, (shape, _) in made.report_signature.items()}
    content = {
        messages.TENSORS: messages.pack(report),
        messages.REPLY: MetricRecord({"steps": 2, "loss": 0.5}),
        messages.REQUEST: ConfigRecord({"training": made.training, "round": 1}),
        "metrics": MetricRecord({"num-examples": 8, "accuracy": 0.5}),
    }
    damaged = _parsed(damage, RecordDict(content))
    if damaged is None:
        return None
    reply: Any = SimpleNamespace(
        has_error=lambda: False, content=damaged, metadata=SimpleNamespace(src_node_id=1), has_content=lambda: True
    )
    made.aggregate_train(1, [reply])
    assert made.server is not None
    finite = torch.isfinite(made.server["theta"]).all()
    made.server = {name: torch.zeros_like(value) for name, value in made.server.items()}
    return None if finite else "the model is not finite"


def mod(folder: Path, rng: Random, damage: Damage) -> str | None:
    """A request to a client of another Flower app."""
    request = vars(keel_strategy())["request"]
    copied = RecordDict({name: type(record)(dict(record)) for name, record in request.items()})
    damaged = _parsed(damage, copied)
    if damaged is None:
        return None
    message: Any = SimpleNamespace(content=damaged)
    context: Any = SimpleNamespace(node_config={"state-dir": str(folder)}, node_id=1)
    try:
        keel_mod()(message, context, lambda message, context: SimpleNamespace(content=RecordDict()))  # type: ignore
    except KeelError:
        return None
    return None if messages.REQUEST not in damaged.config_records else "no error, although the app did not train"


def answers(folder: Path, rng: Random, damage: Damage) -> str | None:
    """A request to a site."""
    policy = folder / "site.toml"
    policy.write_text(tomli_w.dumps(POLICY))
    kind = rng.choice(("query", "train", "evaluate"))
    request = {"spec": SPEC.to_toml(), "training": TRAINING, "study": "s", "last_round": 0, "site": 0}
    tensors = messages.pack({"theta": torch.zeros(SIZE), **({"c": torch.zeros(SIZE)} if kind == "train" else {})})
    content = {messages.REQUEST: ConfigRecord({**request, **messages.request_of(ROUND)}), messages.TENSORS: tensors}
    damaged = _parsed(damage, RecordDict(content))
    if damaged is None:
        return None
    node = {"site": 0, "device": "cpu", "policy": str(policy), "state-dir": str(folder / "state")}
    grid = InProcessGrid(client_app(network, examples), [node])
    [reply] = grid.send_and_receive([Message(damaged, 1, kind, ttl=60.0, group_id="1")])
    if reply.has_error() and not re.fullmatch(r"\S+: (KeelError|PolicyRefusal)", reply.error.reason):
        return f"{kind}: {reply.error.reason}"
    return None


def _parsed(damage: Damage, content: RecordDict) -> RecordDict | None:
    """Return damaged content, or None if Flower itself cannot parse it."""
    try:
        return damage(content)
    except Exception:  # Flower's parser, before any code of Keel
        return None
