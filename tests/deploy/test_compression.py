"""Compressed messages of a federation: the encoded bytes travel, and a site's message is checked before decoding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message

from keel.deploy.messages import TENSORS
from tests.deploy.in_process import InProcessFederation, run_serial


@pytest.fixture
def federation(tmp_path: Any) -> InProcessFederation:
    return InProcessFederation(tmp_path)


@pytest.mark.parametrize(("algorithm", "up"), [("ghbm", "top_k"), ("mime", "random_k"), ("scaffold", "int4")])
def test_a_federation_has_the_bits_and_the_bytes_of_the_simulation(
    federation: InProcessFederation, algorithm: str, up: str
) -> None:
    config = {"algorithm__name": algorithm, "compression__up": up, "compression__down": "int8", "rounds": 3}
    deployed, simulated = federation(**config), run_serial(federation.folder / "serial", **config)
    assert deployed.summary["model_sha256"] == simulated.summary["model_sha256"]
    whole = run_serial(federation.folder / "whole", algorithm__name=algorithm, rounds=3)
    for key in ("bytes_up", "bytes_down"):
        assert [record[key] for record in deployed.records] == [record[key] for record in simulated.records]
        assert deployed.summary[key] < whole.summary[key]  # type: ignore[literal-required]


def tampered(name: str, change: Callable[[np.ndarray], None]) -> Callable[[int, Message], Message]:
    """A filter that changes a tensor in the replies of site 0."""

    def reply_filter(node: int, reply: Message) -> Message:
        if node == 1 and reply.has_content() and name in (record := reply.content.get(TENSORS, {})):
            array = record[name]
            values = np.frombuffer(array.data, array.dtype).copy()
            change(values)
            record[name] = Array(array.dtype, array.shape, array.stype, values.tobytes())
        return reply

    return reply_filter


def beyond(values: np.ndarray) -> None:
    values[-1] = 2**31 - 1


def repeated(values: np.ndarray) -> None:
    values[1] = values[0]


def negative(values: np.ndarray) -> None:
    values[0] = -1


def huge(values: np.ndarray) -> None:
    values[0] = 3e38


@pytest.mark.parametrize(
    ("up", "name", "change", "reason"),
    [
        ("top_k", "delta.indices", beyond, "delta: indices must increase from 0 or more to at most 38"),
        ("top_k", "delta.indices", repeated, "delta: indices must increase"),
        ("int8", "delta.scales", negative, "delta: scales must not be negative"),
        ("int8", "delta.scales", huge, "delta or its norm is not finite"),
        ("sign", "delta.bits", lambda bits: bits.__setitem__(-1, 255), "bits after the last element must be 0"),
    ],
)
def test_a_hostile_encoded_message_is_dropped(
    federation: InProcessFederation, up: str, name: str, change: Callable[[np.ndarray], None], reason: str
) -> None:
    compression = {"compression__up": up} | ({"compression__fraction": 0.1} if up == "top_k" else {})
    run = federation(tampered(name, change), rounds=1, participation__rate=1.0, algorithm__name="fedavg", **compression)
    assert run.records[0]["cohort"] == [2, 1]
    assert reason in run.records[0]["dropped"]["0"]


def test_the_norm_is_bounded_after_decoding(federation: InProcessFederation) -> None:
    settings = {"rounds": 1, "participation__rate": 1.0, "algorithm__name": "fedavg", "compression__up": "int8"}
    # the encoded int8 values have a norm of hundreds, the decoded report one of about 1
    run = federation(federation__max_norm=20.0, **settings)
    assert len(run.records[0]["cohort"]) == 3
