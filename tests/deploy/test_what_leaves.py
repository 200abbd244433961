"""What leaves a site, message by message, in each configuration: the table in docs/security.md."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

import torch
from flwr.app import Message
from torch import nn

from keel.algorithms import REGISTRY, make_algorithm, messages_of
from tests.deploy.in_process import InProcessFederation, site_examples

DESCRIPTION = {
    "site",
    "examples",
    "test_examples",
    "shape",
    "target_shape",
    "classes",
    "moving",
    "model",
    "fingerprint",
}
VERSIONS = {"app", "keel", "torch", "flower"}
REQUEST = {"training", "round"}
"""What each reply repeats of the request."""
ROUND = {*REQUEST, "steps", "loss", "state_lost"}
EVALUATION = {*REQUEST, "loss", "examples", "labelled", "correct"}


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def sent(folder: Path, **config: Any) -> dict[str, set[str]]:
    """Return the names of all tensors, numbers and texts in the replies of a training, by type of message."""
    names: dict[str, set[str]] = {}

    def note(node: int, reply: Message) -> Message:
        found = names.setdefault(reply.metadata.message_type, set())
        for record in reply.content.values():
            found.update(record)
        return reply

    def data(node: Any) -> Any:
        return site_examples(node["site"]), site_examples(node["site"])

    federation = InProcessFederation(folder)
    federation(note, data, rounds=1, participation__rate=1.0, **config)
    return names


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"test": None}, {"train": ROUND | {"delta"}, "evaluate": EVALUATION}),
        ({}, {"train": ROUND | {"delta"}}),
        ({"algorithm__name": "scaffold"}, {"train": ROUND | {"delta", "control"}}),
        ({"algorithm__name": "mime"}, {"train.probe": REQUEST | {"gradient"}, "train": ROUND | {"delta"}}),
        ({"algorithm__name": "mimelitemom"}, {"train": ROUND | {"delta", "gradient"}}),
        ({"algorithm__name": "fednova"}, {"train": ROUND | {"normalised", "norm"}}),
        ({"algorithm__name": "fedadamw"}, {"train": ROUND | {"delta", "v", "c"}}),
        ({"algorithm__name": "fedexp"}, {"train": ROUND | {"delta", "square"}}),
        (
            {"model": normalized, "model__buffers": "average", "local__drop_last": True},
            {"train": ROUND | {"delta", "keel.buffers"}},
        ),
        ({"compression__up": "int8"}, {"train": ROUND | {"delta.values", "delta.scales"}}),
    ],
)
def test_a_site_sends_what_the_table_says_and_nothing_else(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, set[str]]
) -> None:
    names = sent(tmp_path, **config)
    assert names == {"query": DESCRIPTION | VERSIONS, **expected}
    assert set.union(*names.values()) <= set(re.findall(r"`([\w.]+)`", documented()))


def documented() -> str:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    return text.split("## What leaves a site")[1].split("\n## ")[0]


def test_the_table_names_every_algorithm_that_sends_more_than_delta() -> None:
    more = set()
    for name in REGISTRY:
        algorithm = make_algorithm(name, **({"personal_tensors": 1} if name == "fedper" else {}))
        _, reports = messages_of(algorithm, torch.zeros(6), [3, 3])
        if [set(report) for report in reports] != [{"delta"}]:
            more.add(name)
    assert more == {name for name in REGISTRY if f"`{name}`" in documented()} - {"fedper"}
