"""The policy of a site: what it refuses, before it loads any data, and that it fails closed."""

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy import messages
from keel.deploy.new import new_federation
from keel.deploy.settings import read_settings
from keel.deploy.site_policy import read_policy
from keel.privacy.examples import PrivateGradient
from tests.deploy.policies import policy_text, write_policy
from tests.deploy.requests import ask, audit_lines, node_with

ROW = torch.tensor([1.5, -2.25, 19480312.0, 0.125])
"""The private row: the first of the site's examples."""
INPUTS = torch.cat([ROW[None], torch.randn(31, 4, generator=torch.Generator().manual_seed(0))])
LABELS = torch.arange(32) % 2
THETA = torch.zeros(10)


def linear() -> nn.Module:
    return nn.Linear(4, 2)


class Data:
    """A loader that counts its calls."""

    def __init__(self, examples: int = 32, test: int = 0):
        self.examples, self.test, self.loads = examples, test, 0

    def __call__(self, node: Any) -> Any:
        self.loads += 1
        train = INPUTS[: self.examples], LABELS[: self.examples]
        return (train, (INPUTS[: self.test], LABELS[: self.test])) if self.test else train


def report_of(reply: Any) -> torch.Tensor:
    (report,) = messages.unpack_request(reply.content).values()
    return report


def test_without_a_policy_one_step_on_one_example_reveals_the_row(tmp_path: Path) -> None:
    node = {"policy": "", "state-dir": str(tmp_path)}
    reply = ask("train", linear, Data(examples=1), node, THETA, local__steps=1, local__batch=1)
    weight, bias = report_of(reply)[:8].view(2, 4), report_of(reply)[8:]
    assert torch.allclose(weight[0] / bias[0], ROW, rtol=1e-5)


def test_the_default_policy_refuses_that_request_before_the_data_are_loaded(tmp_path: Path) -> None:
    new_federation(tmp_path / "study", 3, "fedavg")
    data, node = Data(), node_with(tmp_path / "study" / "site.toml", tmp_path / "state")
    for settings, field in ({"local__batch": 1}, "min_batch"), ({"local__batch": 16}, "min_steps"):
        reply = ask("train", linear, data, node, THETA, study="study", local__steps=1, **settings)
        assert reply.error.reason == f"policy:{field}: PolicyRefusal"
    assert data.loads == 0
    reply = ask("train", linear, data, node, THETA, study="study", local__steps=2, local__batch=8, rounds=20)
    assert not reply.has_error()


DP_SGD = {"privacy__mechanism": "example", "privacy__clip": 1.0, "privacy__delta": 1e-5}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an algorithm": ({"algorithms": ["fedhbm"]}, {}, "algorithms"),
    "an import": ({}, {"local__loss": "antigravity:loss"}, "references"),
    "a study": ({"study": "other"}, {}, "study"),
    "an expired policy": ({"expires": date(2020, 1, 1)}, {}, "expires"),
    "a small minibatch": ({"min_batch": 8}, {"local__batch": 7}, "min_batch"),
    "few steps": ({"min_steps": 3}, {"local__steps": 2}, "min_steps"),
    "many rounds": ({"max_rounds": 10}, {"rounds": 11}, "max_rounds"),
    "a learning rate": ({"max_lr": 0.5}, {"local__lr": 0.6}, "max_lr"),
    "an unknown field": ({"min_bach": 8}, {}, "file"),
    "a missing field": ({"min_batch": None}, {}, "file"),
    "a wrong type": ({"min_batch": "8"}, {}, "file"),
    "random minibatches": ({}, {"privacy__noise": 1.0, **DP_SGD}, "min_noise"),
    "random minibatches with less noise": ({"min_noise": 1}, {"privacy__noise": 0.9, **DP_SGD}, "min_noise"),
    "noise without clip_norm": ({"noise": 1.0}, {}, "file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_before_the_data_are_loaded(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, settings, field = REFUSED[case]
    data, node = Data(), node_with(write_policy(tmp_path, **policy), tmp_path / "state")
    reply = ask("train", linear, data, node, THETA, **{"local__steps": 2, "rounds": 10, **settings})
    assert reply.error.reason == f"policy:{field}: PolicyRefusal"
    assert data.loads == 0
    assert f"site.toml: {field}: " in caplog.text
    (line,) = audit_lines(tmp_path / "state")
    assert (line["event"], line["reason"]) == ("refused", f"policy:{field}: PolicyRefusal")


def test_a_random_minibatch_may_have_one_example_and_a_site_allows_it_with_enough_noise(tmp_path: Path) -> None:
    """The server knows the seed: it can choose one in which a minibatch has one example."""
    rounds = [PrivateGradient(1.0, 0.0, batch=8).minibatches(100, 2, np.random.default_rng(n)) for n in range(2000)]
    assert any(len(minibatch) == 1 for minibatches in rounds for minibatch in minibatches)
    node = node_with(write_policy(tmp_path, min_noise=1), tmp_path / "state")
    reply = ask("train", linear, Data(), node, THETA, local__steps=2, privacy__noise=1.0, **DP_SGD)
    assert not reply.has_error()


def test_an_object_that_the_policy_lists_may_be_named(tmp_path: Path) -> None:
    name = "torch.nn.functional:cross_entropy"
    node = node_with(write_policy(tmp_path, references=[name]), tmp_path / "state")
    reply = ask("train", linear, Data(), node, THETA, local__steps=2, local__loss=name)
    assert "policy" not in (reply.error.reason if reply.has_error() else "")


@pytest.mark.parametrize("kind", ["query", "train"])
def test_a_site_with_few_examples_does_not_take_part(kind: str, tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, min_examples=20), tmp_path / "state")
    assert ask(kind, linear, Data(19), node, THETA, local__steps=2).error.reason == "policy:min_examples: PolicyRefusal"
    assert not ask(kind, linear, Data(20), node, THETA, local__steps=2).has_error()


def test_the_steps_of_epochs_and_minibatches_larger_than_the_data_count(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, min_steps=2, min_batch=8), tmp_path / "state")
    one_step = ask("train", linear, Data(), node, THETA, local__epochs=1, local__batch=32)
    assert one_step.error.reason == "policy:min_steps: PolicyRefusal"
    few = ask("train", linear, Data(7), node, THETA, local__epochs=2, local__batch=32)
    assert few.error.reason == "policy:min_batch: PolicyRefusal"


def test_the_last_minibatch_of_an_epoch_does_not_reveal_a_row(tmp_path: Path) -> None:
    """33 examples in minibatches of 32 and 1, and again in minibatches of 11, give the gradient of one example."""
    inputs, labels = torch.randn(33, 4, generator=torch.Generator().manual_seed(1)), torch.arange(33) % 2
    settings = {"local__epochs": 1, "local__lr": 1e-5}

    def request(node: dict[str, Any], kind: str = "train", **changed: Any) -> Any:
        return ask(kind, linear, lambda n: (inputs, labels), node, THETA, **settings, **changed)

    open_node = {"policy": "", "state-dir": str(tmp_path)}
    uneven, even = (report_of(request(open_node, local__batch=batch)) for batch in (32, 11))
    gradient = uneven - even * 11 / 32  # 31/32 of the one in the last minibatch
    recovered = gradient[:4] / gradient[8]
    assert any(torch.allclose(recovered, row, rtol=1e-2) for row in inputs)
    node = node_with(write_policy(tmp_path, min_batch=8, min_steps=2), tmp_path / "state")
    assert not request(node, local__batch=11).has_error()
    for kind in "query", "train":
        assert request(node, kind, local__batch=32).error.reason == "policy:min_batch: PolicyRefusal"
    assert not request(node, local__batch=16, local__drop_last=True).has_error()


def test_evaluation_can_be_forbidden_and_needs_enough_test_examples(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, evaluation=False), tmp_path / "state")
    data = Data(test=9)
    assert ask("evaluate", linear, data, node, THETA, local__steps=2).error.reason == "policy:evaluation: PolicyRefusal"
    assert data.loads == 0
    write_policy(tmp_path, min_test_examples=10)
    reply = ask("evaluate", linear, data, node, THETA, local__steps=2)
    assert reply.error.reason == "policy:min_test_examples: PolicyRefusal"
    assert not ask("evaluate", linear, Data(test=10), node, THETA, local__steps=2).has_error()


@pytest.mark.parametrize("kind", ["evaluate.default", "evaluate"])
def test_no_message_type_evaluates_where_evaluation_is_forbidden(kind: str, tmp_path: Path) -> None:
    node, data = node_with(write_policy(tmp_path, evaluation=False), tmp_path / "state"), Data(test=20)
    reply = ask(kind, linear, data, node, THETA, local__steps=2)
    assert reply.error.reason == "policy:evaluation: PolicyRefusal"
    assert data.loads == 0


@pytest.mark.parametrize("evaluation", [{"on": "validation"}, {"clients": 1}])
@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
def test_no_request_evaluates_on_training_examples(kind: str, evaluation: dict[str, Any], tmp_path: Path) -> None:
    node, data = node_with(write_policy(tmp_path), tmp_path / "state"), Data(test=20)
    settings = {"algorithm.name": "fedavg", "federation.sites": 1, "federation.out": "-", "local.steps": 2}
    spec, _ = read_settings(settings)
    table = tomllib.loads(spec.to_toml())
    crafted = {"spec": tomli_w.dumps({**table, "evaluation": {**table["evaluation"], **evaluation}})}
    reply = ask(kind, linear, data, node, THETA, crafted=crafted, local__steps=2)
    assert reply.error.reason == "policy:evaluation: PolicyRefusal"
    assert data.loads == 0


def test_evaluations_count_as_reports(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, max_reports=2), tmp_path / "state")
    replies = [ask("evaluate", linear, Data(test=20), node, THETA, local__steps=2) for _ in range(3)]
    assert [reply.has_error() for reply in replies] == [False, False, True]
    assert replies[2].error.reason == "policy:max_reports: PolicyRefusal"
    none = ask("evaluate", linear, Data(), node, THETA, local__steps=2)
    assert not none.has_error(), "without test examples nothing leaves"


CRAFTED: dict[str, tuple[dict[str, Any], str]] = {
    "a learning rate above that of the settings": ({"lr": 1e6}, "policy:max_lr: PolicyRefusal"),
    "a negative learning rate": ({"lr": -1e6}, "policy:max_lr: PolicyRefusal"),
    "a learning rate that is not finite": ({"lr": float("nan")}, "internal: KeelError"),
    "a learning rate as text": ({"lr": "1"}, "internal: KeelError"),
    "no learning rate": ({"lr": None}, "internal: KeelError"),
    "an infinite period": ({"period": float("inf")}, "internal: KeelError"),
    "a fraction of a round": ({"round": 1.5}, "internal: KeelError"),
    "a round as text": ({"round": "1"}, "internal: KeelError"),
    "a round as truth value": ({"round": True}, "internal: KeelError"),
    "round zero": ({"round": 0}, "internal: KeelError"),
    "no round": ({"round": None}, "internal: KeelError"),
}


@pytest.mark.parametrize("kind", ["train", "train.probe", "train.default"])
@pytest.mark.parametrize("case", CRAFTED)
def test_the_numbers_of_a_round_are_checked_before_the_data_are_loaded(case: str, kind: str, tmp_path: Path) -> None:
    crafted, reason = CRAFTED[case]
    node, data = node_with(write_policy(tmp_path, max_lr=10.0), tmp_path / "state"), Data()
    assert ask(kind, linear, data, node, THETA, crafted=crafted, local__steps=2).error.reason == reason
    assert data.loads == 0


def test_reports_are_counted_over_all_requests(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, max_reports=2), tmp_path / "state")
    replies = [ask("train", linear, Data(), node, THETA, local__steps=2) for _ in range(3)]
    assert [reply.has_error() for reply in replies] == [False, False, True]
    assert replies[2].error.reason == "policy:max_reports: PolicyRefusal"


def test_a_reply_that_is_too_large_does_not_leave(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, max_reply_mb=39 / 2**20), tmp_path / "state")
    assert (
        ask("train", linear, Data(), node, THETA, local__steps=2).error.reason == "policy:max_reply_mb: PolicyRefusal"
    )
    write_policy(tmp_path, max_reply_mb=40 / 2**20)
    assert not ask("train", linear, Data(), node, THETA, local__steps=2).has_error()


@pytest.mark.parametrize("value", [None, 0, "missing.toml"])
def test_a_node_without_a_policy_answers_nothing(value: Any, tmp_path: Path) -> None:
    data, node = Data(), {"policy": value, "state-dir": str(tmp_path / "state")}
    assert ask("query", linear, data, node, THETA, local__steps=2).error.reason == "policy:file: PolicyRefusal"
    assert data.loads == 0


def test_the_error_of_a_policy_names_the_file_and_the_field(tmp_path: Path) -> None:
    file = write_policy(tmp_path, min_batch=0)
    with pytest.raises(KeelError, match=r"site.toml'?: min_batch must be greater than or equal to 1 \(got 0\)"):
        read_policy(file)
    file.write_text("study =")
    with pytest.raises(KeelError, match="is not a TOML file"):
        read_policy(file)
    file.write_text(policy_text())
    assert read_policy(file).timeout_seconds == 600.0
