"""What each algorithm sends and keeps, from the messages and states that its code makes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keel.algorithms import REGISTRY, messages_of

SIZES = (64, 32, 4)
"""The tensors of a small model. A tensor as long as their sum is the size of the model."""


def markdown() -> str:
    """Return a table with a row for each algorithm."""
    rows = [
        "| algorithm | server to client | client to server | client state | server state |",
        "|---|---|---|---|---|",
    ]
    for name, cls in REGISTRY.items():
        algorithm, theta = cls(), torch.zeros(sum(SIZES))
        if algorithm.pooled:
            continue
        down, up = messages_of(algorithm, theta, SIZES)
        states = [[algorithm.init_client(theta)], [algorithm.init_server(theta)]]
        cells = [_tensors(group) for group in (down, up, *states)]
        rows.append(f"| [{cls.title}](algorithms/{name}.md) | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _tensors(messages: Iterable[Mapping[str, Any]]) -> str:
    return ", then ".join(
        ", ".join(f"`{key}`{_size(t)}" for key, t in message.items()) for message in messages if message
    )


def _size(tensor: torch.Tensor) -> str:
    elements = tensor.numel()
    if elements == sum(SIZES):
        return ""
    return " (number)" if elements == 1 else " (part)"
