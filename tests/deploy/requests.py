"""Requests of a server to one site in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from keel.algorithms.base import Context
from keel.deploy import messages
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app

TRAINING = "0123456789abcdef" * 2
KINDS = ("query", "train", "train.probe", "evaluate")
ROUND = Context(round=1, clients=1, cohort=1, share=1.0, period=1.0, lr=0.1, server_lr=1.0)


def ask(
    kind: str,
    model: Callable[[], nn.Module],
    data: Callable[[Any], Any],
    node: dict[str, Any],
    theta: torch.Tensor,
    study: str = "trial",
    crafted: dict[str, Any] | None = None,
    **config: Any,
) -> Message:
    """Send one request to a site and return its reply; `local__steps` sets `local.steps`.

    Args:
        crafted: Parameters of the request that Keel's server would not send; None leaves one out.
    """
    settings = {key.replace("__", "."): value for key, value in config.items()}
    spec, _ = read_settings({"algorithm.name": "fedavg", "federation.sites": 1, "federation.out": "-", **settings})
    request: dict[str, Any] = {"spec": spec.to_toml(), "training": TRAINING, "study": study, "last_round": 0, "site": 0}
    request |= {**messages.request_of(ROUND), "lr": spec.local.lr, **(crafted or {})}
    content = RecordDict(
        {
            messages.REQUEST: ConfigRecord({name: value for name, value in request.items() if value is not None}),
            messages.TENSORS: messages.pack({"theta": theta}),
        }
    )
    return send(kind, content, model, data, node)


def send(
    kind: str, content: RecordDict, model: Callable[[], nn.Module], data: Callable[[Any], Any], node: dict[str, Any]
) -> Message:
    grid = InProcessGrid(client_app(model, data), [{"site": 0, "device": "cpu", **node}])
    (reply,) = grid.send_and_receive([Message(content, 1, kind, ttl=60.0, group_id="1")])
    return reply


def node_with(policy: Path, state: Path) -> dict[str, Any]:
    return {"policy": str(policy), "state-dir": str(state)}


def audit_lines(state: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (state / "audit.jsonl").read_text().splitlines()]
