"""What leaves a site: no cell of its data in an error, and a keyed fingerprint in its description."""

import hmac
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import nn

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.core.flat_model import FlatModel
from keel.deploy import messages
from keel.deploy.site_audit import is_recorded, record
from keel.deploy.site_errors import SiteError, reason_of
from tests.deploy.policies import write_policy
from tests.deploy.requests import KINDS, ask, audit_lines, node_with, send

CELL = "19480312060"
THETA = torch.zeros(10)
INPUTS, LABELS = torch.zeros(8, 4), torch.arange(8) % 2
FORM = re.compile(r"(approval|policy:\w+|data|model|state|timeout|internal): \w+")


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def raising(error: Exception) -> Callable[..., Any]:
    def load(node: Any = None) -> Any:
        raise error

    return load


CellError = type(f"Cell {CELL}", (Exception,), {})
FAILURES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], str]] = {
    "KeelError of a loader": (linear, raising(KeelError(f"data.labels: {CELL}")), "data: KeelError"),
    "ValueError of a loader": (linear, raising(ValueError(CELL)), "data: ValueError"),
    "KeyError of a loader": (linear, raising(KeyError(CELL)), "data: KeyError"),
    "class named after a cell": (linear, raising(CellError()), "data: Exception"),
    "labels as text": (linear, lambda node: (INPUTS, [CELL] * 8), "data: "),
    "label in the wrong column": (linear, lambda node: (INPUTS, [int(CELL)] * 8), ""),
    "inputs of the wrong shape": (linear, lambda node: (torch.full((8, 3), float(CELL)), LABELS), "data: "),
    "the model": (raising(ValueError(CELL)), lambda node: (INPUTS, LABELS), "model: ValueError"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FAILURES)
def test_an_error_leaves_a_site_as_a_code_and_a_class(
    case: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, data, expected = FAILURES[case]
    node = node_with(write_policy(tmp_path), tmp_path / "state")
    reply = ask(kind, model, data, node, THETA, local__steps=2)
    if not reply.has_error():
        assert case == "label in the wrong column"
        assert kind == "evaluate", "a site without test examples evaluates nothing"
        return
    assert FORM.fullmatch(reply.error.reason)
    assert reply.error.reason.startswith(expected)
    assert CELL not in reply.error.reason
    assert CELL not in (tmp_path / "state" / "audit.jsonl").read_text()
    assert "Traceback" in caplog.text


def test_a_request_without_parameters_is_refused(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path), tmp_path / "state")
    reply = send("train", RecordDict(), linear, lambda node: (INPUTS, LABELS), node)
    assert reply.error.reason == "internal: KeelError"


@pytest.mark.parametrize(
    ("kind", "crafted", "theta"),
    [
        ("train", {"spec": "a = "}, THETA),
        ("train", {"spec": 5}, THETA),
        ("train", {"spec": "algorithm = 1"}, THETA),
        ("train", {"training": 5}, THETA),
        ("train", {"last_round": "x"}, THETA),
        ("evaluate", {"round": None}, THETA),
        ("evaluate", {}, torch.zeros(7)),
        ("train", {}, torch.zeros(10, dtype=torch.float64)),
    ],
    ids=["TOML", "spec", "table", "training", "last_round", "round", "shape", "dtype"],
)
def test_a_malformed_request_is_refused_as_such(
    kind: str, crafted: dict[str, Any], theta: torch.Tensor, tmp_path: Path
) -> None:
    node = node_with(write_policy(tmp_path), tmp_path / "state")
    reply = ask(kind, linear, lambda node: ((INPUTS, LABELS), (INPUTS, LABELS)), node, theta, crafted=crafted)
    assert reply.error.reason == "internal: KeelError"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Array("nn", (10,), messages.RAW, bytes(40)), "dtype nn"),
        (Array("float32", (-1,), messages.RAW, bytes(40)), r"shape \[-1\]"),
        (Array("float32", (10,), "pickle", bytes(40)), "serialisation pickle"),
        (Array("float32", (10,), messages.RAW, bytes(4)), "has 4 bytes"),
    ],
    ids=["dtype", "shape", "pickle", "bytes"],
)
def test_a_tensor_that_cannot_be_read_is_refused(array: Array, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        messages.unpack_request(RecordDict({messages.TENSORS: ArrayRecord({"theta": array})}))
    with pytest.raises(KeelError, match="has no record"):
        messages.unpack_request(RecordDict())
    empty = messages.pack({"theta": torch.zeros(0)})
    assert messages.unpack_request(RecordDict({messages.TENSORS: empty}))["theta"].shape == (0,)


def test_a_wrong_training_id_is_an_error_of_the_state() -> None:
    assert reason_of(SiteError("state", KeelError(CELL))) == "state: KeelError"


@pytest.mark.parametrize("label", [2, -1])
def test_labels_that_the_model_lacks_fail_when_the_site_joins(label: int, tmp_path: Path) -> None:
    labels = torch.cat([LABELS[:7], torch.tensor([label])])
    node = node_with(write_policy(tmp_path), tmp_path / "state")
    assert (
        ask("query", linear, lambda n: (INPUTS, labels), node, THETA, local__steps=2).error.reason == "data: KeelError"
    )
    test = (INPUTS, LABELS), (INPUTS, labels)
    assert ask("query", linear, lambda n: test, node, THETA, local__steps=2).error.reason == "data: KeelError"


def description(state: Path, data: Any, **node: Any) -> dict[str, Any]:
    reply = ask("query", linear, lambda n: data, {"state-dir": str(state), **node}, THETA, local__steps=2)
    return dict(reply.content.config_records["keel.reply"])


def test_the_description_has_versions_app_test_examples_and_a_keyed_fingerprint(tmp_path: Path) -> None:
    data = (INPUTS, LABELS), (INPUTS[:3], LABELS[:3])
    first = description(tmp_path / "a", data, app="f" * 64)
    assert (first["test_examples"], first["app"]) == (3, "f" * 64)
    assert [first[name] for name in ("keel", "torch", "flower")] == [version(p) for p in ("keel-fl", "torch", "flwr")]
    assert first["fingerprint"] == description(tmp_path / "a", data)["fingerprint"], "stable"
    assert re.fullmatch("[0-9a-f]{64}", first["fingerprint"])
    assert first["fingerprint"] != description(tmp_path / "b", data)["fingerprint"], "another key"
    for other in (
        ((INPUTS + 1e-6, LABELS), data[1]),
        ((INPUTS, 1 - LABELS), data[1]),
        (data[0], (INPUTS[:3], 1 - LABELS[:3])),
        data[0],
    ):
        assert first["fingerprint"] != description(tmp_path / "a", other)["fingerprint"], "other data"
    key = tmp_path / "a" / "fingerprint.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == 32
    assert description(tmp_path / "c", data[0])["app"] == ""
    assert hmac.compare_digest(first["model"], description(tmp_path / "c", data)["model"])


def test_each_answer_has_a_line_in_the_audit_log(tmp_path: Path) -> None:
    node = {**node_with(write_policy(tmp_path), tmp_path / "state"), "app": "f" * 64}
    theta = FlatModel(linear()).weights
    for kind in "query", "train":
        assert not ask(kind, linear, lambda n: (INPUTS, LABELS), node, theta, local__steps=2).has_error()
    query, train = audit_lines(tmp_path / "state")
    assert (query["event"], query["kind"], query["norm"], query["bytes"]) == ("answered", "query", None, 0)
    assert (train["kind"], train["round"], train["app"], train["bytes"]) == ("train", "1", "f" * 64, 40)
    assert train["norm"] > 0
    assert train["versions"]["flower"] == version("flwr")
    assert query["settings"] == train["settings"]
    assert train["training"] == "0123456789abcdef" * 2
    assert (tmp_path / "state" / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_settings_count_as_recorded_only_with_their_text(tmp_path: Path) -> None:
    """A server chooses the training's name: its hash in that field must not keep the settings out of the log."""
    digest = "a" * 64
    assert not is_recorded(tmp_path, digest)
    record(tmp_path, "answered", training=digest, settings="b" * 64, spec="x = 1")
    assert not is_recorded(tmp_path, digest)
    record(tmp_path, "answered", training="", settings=digest, spec="x = 2")
    assert is_recorded(tmp_path, digest)
