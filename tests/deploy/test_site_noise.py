"""Clipping and noise that a site applies to its report before it leaves."""

from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy import messages
from keel.deploy.site_errors import PolicyRefusal
from keel.deploy.site_noise import clip_and_add_noise
from keel.privacy.clipping import joint_norm
from tests.deploy.policies import write_policy
from tests.deploy.requests import ask, node_with

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)) * 100
LABELS = torch.arange(32) % 2


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def train(policy: Path, state: Path) -> torch.Tensor:
    node = node_with(policy, state)
    reply = ask("train", linear, lambda node: (INPUTS, LABELS), node, torch.zeros(10), local__steps=2)
    (report,) = messages.unpack_request(reply.content).values()
    return report


def test_all_tensors_of_a_report_are_clipped_together() -> None:
    report = {"delta": torch.tensor([3.0, 0.0]), "c": torch.tensor([[4.0]])}
    clipped = clip_and_add_noise(report, 1.0, 0.0)
    assert joint_norm(clipped) == pytest.approx(1.0)
    assert clipped["c"].item() == pytest.approx(0.8)
    assert clip_and_add_noise(report, 6.0, 0.0)["delta"].tolist() == [3.0, 0.0]


def test_noise_has_the_standard_deviation_of_the_policy_and_never_repeats() -> None:
    zeros = {"delta": torch.zeros(100_001)}
    first, second = (clip_and_add_noise(zeros, 2.0, 0.5)["delta"] for _ in range(2))
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6  # without a seed
    assert not torch.equal(first, second)


def test_a_report_that_cannot_be_clipped_does_not_leave() -> None:
    with pytest.raises(PolicyRefusal, match="clip_norm"):
        clip_and_add_noise({"count": torch.ones(2, dtype=torch.long)}, 1.0, 0.0)


def test_averaged_buffers_do_not_leave_a_site_that_clips(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    node = node_with(write_policy(tmp_path, clip_norm=1.0), tmp_path / "state")
    settings = {"local__steps": 2, "model__buffers": "average"}
    reply = ask("train", model, lambda node: (INPUTS, LABELS), node, torch.zeros(18), **settings)
    assert "clip_norm" in reply.error.reason


def test_the_policy_clips_what_a_site_sends_and_its_noise_differs_with_the_same_request(tmp_path: Path) -> None:
    plain = train(write_policy(tmp_path), tmp_path / "state")
    assert float(plain.norm()) > 1
    clipped = train(write_policy(tmp_path, clip_norm=0.01), tmp_path / "state")
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-5)
    assert torch.allclose(clipped / clipped.norm(), plain / plain.norm(), atol=1e-5)
    policy = write_policy(tmp_path, clip_norm=0.01, noise=1.0)
    assert not torch.equal(train(policy, tmp_path / "state"), train(policy, tmp_path / "state"))
