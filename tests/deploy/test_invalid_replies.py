"""The server drops every invalid reply: the training continues as if the site had not replied."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from keel.deploy import messages
from keel.deploy.flower_adapter import InProcessGrid
from keel.runs.run import Run
from tests.deploy.in_process import InProcessFederation, site_examples


def nan(content: RecordDict) -> None:
    arrays = content.array_records[messages.TENSORS]
    data = bytearray(arrays["delta"].data)
    data[:4] = np.float32("nan").tobytes()
    arrays["delta"] = Array("float32", arrays["delta"].shape, messages.RAW, bytes(data))


def wrong_shape(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.zeros(7)})


def wrong_dtype(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.zeros(39, dtype=torch.int32)})


def too_few_bytes(content: RecordDict) -> None:
    content[messages.TENSORS] = ArrayRecord({"delta": Array("float32", (39,), messages.RAW, b"1234")})


def pickled(content: RecordDict) -> None:
    content[messages.TENSORS] = ArrayRecord(
        {"delta": Array("float32", (39,), "pickle", b"cos\nsystem\n(S'false'\ntR.")}
    )


def too_many(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.zeros(39), "extra": torch.zeros(39)})


def wrong_names(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"other": torch.zeros(39)})


def long_name(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"x" * 10_000: torch.zeros(39)})


def huge_name(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"x" * 2**21: torch.zeros(39)})


def huge_dtype(content: RecordDict) -> None:
    content[messages.TENSORS] = ArrayRecord({"delta": Array("x" * 2**21, (39,), messages.RAW, b"")})


def huge_shape(content: RecordDict) -> None:
    content[messages.TENSORS] = ArrayRecord({"delta": Array("float32", (1,) * 2**18, messages.RAW, b"")})


def long_number(content: RecordDict) -> None:
    content.config_records[messages.REQUEST]["round"] = "x" * 10_000


def extra_record(content: RecordDict) -> None:
    content["extra"] = messages.pack({"extra": torch.zeros(2**20)})


def large_text(content: RecordDict) -> None:
    content.config_records[messages.REQUEST]["note"] = "x" * 2**21


def negative_loss(content: RecordDict) -> None:
    content.metric_records[messages.REPLY]["loss"] = -1.0


def huge_loss(content: RecordDict) -> None:
    content.metric_records[messages.REPLY]["loss"] = 1e300


def stale(content: RecordDict) -> None:
    content.config_records[messages.REQUEST]["round"] = 1


def another_training(content: RecordDict) -> None:
    content.config_records[messages.REQUEST]["training"] = "0" * 32


def no_steps(content: RecordDict) -> None:
    content.metric_records[messages.REPLY]["steps"] = 0


def wrong_steps(content: RecordDict) -> None:
    content.metric_records[messages.REPLY]["steps"] = 10**9


def infinite_norm(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), 3e38)})


def large_norm(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), 1e6)})


def far_norm(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), 14.4)})


def infinite_loss(content: RecordDict) -> None:
    content.metric_records[messages.REPLY]["loss"] = float("inf")


def empty(content: RecordDict) -> None:
    for name in list(content):
        del content[name]


INVALID: dict[Callable[[RecordDict], None], str] = {
    nan: "not finite",
    wrong_shape: "shape",
    wrong_dtype: "int32",
    too_few_bytes: "4 bytes",
    pickled: "pickle",
    too_many: "oversize: has 2 tensors with 312 bytes; expected 1 with 156",
    wrong_names: "other",
    long_name: "has tensors",
    huge_name: "oversize: has 2",
    huge_dtype: "oversize: has 2",
    huge_shape: "oversize: has 2",
    long_number: "stale: belongs to round",
    extra_record: "has the unknown record 'extra'",
    large_text: "oversize: has 2",
    negative_loss: "loss is -1, but cross entropy is never negative",
    huge_loss: "loss is 1e+300, above",
    stale: "stale: belongs to round 1",
    another_training: "another run",
    no_steps: "steps",
    wrong_steps: "steps is 1000000000; expected 2",
    infinite_norm: "delta or its norm is not finite",
    large_norm: "delta has norm 6.245e+06, above federation.max_norm = 100",
    far_norm: "rejected: the norm of delta is 89.9, the median is 0.",
    infinite_loss: "loss",
    empty: "no numbers",
}
SETTINGS: dict[str, Any] = {
    "algorithm__name": "fedhbm",
    "participation__rate": 1.0,
    "federation__max_norm": 100,
    "rounds": 3,
}


@pytest.fixture(scope="module")
def without_reply(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which site 1 does not reply in round 2."""

    def drop(node: int, reply: Message) -> Message | None:
        return None if node == 2 and reply.metadata.group_id == "2" else reply

    run = InProcessFederation(tmp_path_factory.mktemp("without"))(drop, **SETTINGS)
    assert run.records[1]["dropped"] == {"1": "late: no reply within 0.05 s"}
    return run


@pytest.mark.parametrize("spoil", INVALID, ids=lambda spoil: spoil.__name__)
def test_an_invalid_reply_has_the_effect_of_a_missing_one(
    spoil: Callable[[RecordDict], None],
    federation: InProcessFederation,
    without_reply: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def spoil_round_2(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.group_id == "2" and reply.metadata.message_type == "train":
            spoil(reply.content)
        return reply

    with caplog.at_level(logging.WARNING):
        run = federation(spoil_round_2, **SETTINGS)
    assert run.summary["model_sha256"] == without_reply.summary["model_sha256"]
    assert INVALID[spoil] in run.records[1]["dropped"]["1"]
    assert len(run.records[1]["dropped"]["1"]) <= 300
    assert f"round 2: dropped site 1: {run.records[1]['dropped']['1']}" in caplog.text
    assert run.records[1]["cohort"] == [2, 0]
    assert "dropped" not in run.records[2]


MALFORMED: dict[str, tuple[type[ConfigRecord | ArrayRecord], bytes]] = {
    "DecodeError": (ConfigRecord, b"ConfigRecord  4\x00\xff\xff\xff\xff"),
    "AttributeError": (ArrayRecord, b"ArrayRecord  2\x00[]"),
    "RecursionError": (ArrayRecord, b"ArrayRecord  100000\x00" + b"[" * 100000),
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_reply_that_flower_cannot_parse_is_dropped(
    error: str, federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower parses a reply when the server pulls it."""
    malformed: list[str] = []

    def remember(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.group_id == "2":
            malformed.append(reply.metadata.reply_to_message_id)
        return reply

    def parse(self: InProcessGrid, message_ids: Iterable[str]) -> Iterable[Message]:
        if set(message_ids) & set(malformed):
            record, content = MALFORMED[error]
            record.inflate(content)
        return pull(self, message_ids)

    pull = InProcessGrid.pull_messages
    monkeypatch.setattr(InProcessGrid, "pull_messages", parse)
    run = federation(remember, participation__rate=1.0, rounds=2)
    assert run.status == "finished"
    assert f"malformed: {error}" in run.records[1]["dropped"]["1"]


def test_an_exception_at_a_site_reaches_the_server_without_its_text(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    calls = {0: 0, 1: 0, 2: 0}

    def fail_in_third_call(node: dict[str, int]) -> Any:
        calls[node["site"]] += 1
        if node["site"] == 0 and calls[0] == 3:
            raise ValueError("could not convert 'Jane Doe' to a number")
        return site_examples(node["site"])

    run = federation(data=fail_in_third_call, participation__rate=1.0, rounds=2)
    assert run.records[1]["dropped"] == {"0": "data: ValueError"}
    assert [r.levelname for r in caplog.records if "Jane Doe" in (r.exc_text or "")] == ["ERROR"]


EVALUATIONS: dict[str, dict[str, Any]] = {
    "more targets than examples": {"labelled": 10**6},
    "negative cross entropy": {"loss": -5.0},
    "more correct than targets": {"correct": 10**6},
    "more examples than declared": {"correct": 10**6, "labelled": 10**6, "examples": 10**6},
    "fewer examples than declared": {"correct": 1, "labelled": 1, "examples": 1},
    "infinite loss": {"loss": float("inf")},
    "huge loss": {"loss": 1e300},
}


@pytest.mark.parametrize("numbers", EVALUATIONS.values(), ids=list(EVALUATIONS))
def test_an_impossible_evaluation_is_dropped(
    numbers: dict[str, Any], federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def falsify(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "evaluate":
            reply.content.metric_records[messages.REPLY].update(numbers)
        return reply

    federation(
        falsify, data=lambda node: (site_examples(node["site"]), site_examples(node["site"])), test=None, rounds=1
    )
    assert "evaluation of round 1: dropped site 1" in caplog.text


def test_an_evaluation_of_an_earlier_round_is_dropped(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "evaluate":
            reply.content.config_records[messages.REQUEST]["round"] = 1
        return reply

    federation(stale, data=lambda node: (site_examples(node["site"]), site_examples(node["site"])), test=None, rounds=2)
    assert "evaluation of round 2: dropped site 1: stale: belongs to round 1" in caplog.text
    assert "evaluation of round 1" not in caplog.text
