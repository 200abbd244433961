"""The privacy mechanism of the spec at a site: it clips and noises by the operating system's randomness."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy import messages
from keel.deploy.settings import read_settings
from keel.errors import KeelError
from tests.deploy.policies import write_policy
from tests.deploy.requests import ask, node_with

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)) * 100
LABELS = torch.arange(32) % 2
BASE = {"algorithm.name": "fedavg", "federation.sites": 3, "federation.out": "-"}


def reply(tmp_path: Path, batch: int = 64, **privacy: Any) -> Any:
    node = node_with(write_policy(tmp_path, min_noise=1e-6), tmp_path / "state")
    fields = {f"privacy__{name}": value for name, value in {"clip": 0.5, "delta": 1e-5, **privacy}.items()}
    fields |= {"local__batch": batch}
    return ask("train", lambda: nn.Linear(4, 2), lambda node: (INPUTS, LABELS), node, torch.zeros(10), **fields).content


def report(content: Any) -> torch.Tensor:
    return messages.unpack_request(content)["delta"]


def test_a_site_clips_its_report_to_the_norm_of_the_spec(tmp_path: Path) -> None:
    content = reply(tmp_path, noise=1.0)
    assert float(report(content).norm()) == pytest.approx(0.5, rel=1e-5)
    assert content[messages.REPLY]["loss"] > 0


@pytest.mark.parametrize("mechanism", ["local", "example"])
def test_the_noise_of_a_site_does_not_follow_from_the_seed_and_its_loss_is_hidden(
    mechanism: str, tmp_path: Path
) -> None:
    first, second = (reply(tmp_path, noise=1.0, mechanism=mechanism) for _ in range(2))
    assert not torch.equal(report(first), report(second))
    assert first[messages.REPLY]["loss"] == 0.0


def test_the_minibatches_of_a_site_do_not_follow_from_the_seed(tmp_path: Path) -> None:
    """With little noise two reports differ by the Poisson samples of the examples, far more than by the noise."""
    first, second = (reply(tmp_path, batch=4, noise=1e-6, mechanism="example") for _ in range(2))
    assert float((report(first) - report(second)).norm()) > 1e-3


def test_sites_know_the_seed_so_that_no_cohort_is_secret() -> None:
    privacy = {"privacy.clip": 0.5, "privacy.delta": 1e-5, "privacy.noise": 1.0}
    assert read_settings({**BASE, **privacy})[0].participation.sampler == "cyclic"
    for sampler in ("poisson", "uniform"):
        with pytest.raises(KeelError, match=r"participation\.sampler must be 'cyclic'"):
            read_settings({**BASE, **privacy, "participation.sampler": sampler})


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"epsilon": 1.0}, "privacy.noise must be set"),
        ({"noise": 1.0, "mechanism": "tree"}, "mechanism = 'tree' is not supported in a federation"),
        ({"noise": 1.0, "quantile": 0.5}, "quantile = 0.5 is not supported in a federation"),
    ],
)
def test_what_sites_could_undo_is_refused(privacy: dict[str, Any], message: str) -> None:
    fields = {f"privacy.{name}": value for name, value in {"clip": 0.5, "delta": 1e-5, **privacy}.items()}
    sampler = {"participation.sampler": "cyclic"} if "mechanism" in privacy else {}
    with pytest.raises(KeelError, match=message):
        read_settings({**BASE, **fields, **sampler})
