"""Sites join and leave a training that is resumed, and a finished training gets more rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.runs.folder import RunFolder
from tests.deploy.in_process import InProcessFederation, run_serial, site_examples

EVERYONE: dict[str, Any] = {"participation__rate": 1.0}


@pytest.mark.parametrize("name", ["fedhbm", "scaffold"])
def test_a_finished_run_that_gets_more_rounds_equals_one_that_had_them(
    name: str, federation: InProcessFederation, tmp_path: Path
) -> None:
    federation(rounds=2, algorithm__name=name, **EVERYONE)
    longer = federation(rounds=4, algorithm__name=name, **EVERYONE)
    serial = run_serial(tmp_path / "serial", rounds=4, algorithm__name=name, **EVERYONE)
    assert longer.summary["model_sha256"] == serial.summary["model_sha256"]
    assert [record["round"] for record in longer.records] == [1, 2, 3, 4]
    assert (longer.path / "model.safetensors").stat().st_mtime >= longer.path.joinpath("summary.json").stat().st_mtime


def test_more_rounds_need_the_same_spec_otherwise(federation: InProcessFederation) -> None:
    federation(rounds=1)
    with pytest.raises(KeelError, match="another spec"):
        federation(rounds=2, local__lr=0.2)


def test_a_finished_run_keeps_its_spec_unless_rounds_are_added(federation: InProcessFederation) -> None:
    run = federation(rounds=1, **EVERYONE)
    files = {name: (run.path / name).read_bytes() for name in ("spec.toml", "summary.json")}
    with pytest.raises(KeelError, match="another spec"):
        federation(rounds=1, server__largest_weight=0.4, **EVERYONE)
    federation(rounds=1, federation__sites=2, **EVERYONE)
    with pytest.raises(KeelError, match="site 3 did not connect"):
        federation(rounds=2, federation__sites=4, **EVERYONE)
    assert {name: (run.path / name).read_bytes() for name in files} == files


def test_a_site_that_has_left_is_neither_trained_nor_evaluated(federation: InProcessFederation, caplog: Any) -> None:
    tests = {"data": lambda node: (site_examples(node["site"]), site_examples(node["site"])), "test": None}
    federation(rounds=2, **EVERYONE, **tests)
    run = federation(rounds=4, federation__left="1", **EVERYONE, **tests)
    assert [sorted(record["cohort"]) for record in run.records] == [[0, 1, 2]] * 2 + [[0, 2]] * 2
    assert [record["test_examples"] for record in run.records] == [27, 27, 23, 23]
    assert all("dropped" not in record and "evaluation_missing" not in record for record in run.records)
    assert "claims to be site 1, but it has left (federation.left)" in caplog.text
    back = federation(rounds=5, **EVERYONE, **tests)
    assert sorted(back.records[-1]["cohort"]) == [0, 1, 2]


def test_a_smaller_number_of_sites_removes_the_last_ones(federation: InProcessFederation) -> None:
    federation(rounds=1, **EVERYONE)
    run = federation(rounds=2, federation__sites=2, **EVERYONE)
    assert sorted(run.records[-1]["cohort"]) == [0, 1]


@pytest.mark.parametrize("name", ["fedavg", "fedhbm", "scaffold", "feddyn", "ghbm"])
def test_a_site_that_joins_later_is_trained(name: str, federation: InProcessFederation) -> None:
    federation(rounds=2, federation__sites=2, algorithm__name=name, **EVERYONE)
    run = federation(rounds=4, federation__sites=3, algorithm__name=name, **EVERYONE)
    assert [sorted(record["cohort"]) for record in run.records] == [[0, 1]] * 2 + [[0, 1, 2]] * 2
    sites = RunFolder(run.path).environment["sites"]
    assert [(site["site"], site["joined"]) for site in sites] == [(0, 0), (1, 0), (2, 2)]
    assert federation(rounds=4, federation__sites=3, algorithm__name=name, **EVERYONE).summary == run.summary


def test_the_servers_mean_of_scaffold_stays_the_mean_over_all_sites(federation: InProcessFederation) -> None:
    """c is the mean of the control variates. A joining site's is zero, so that c shrinks before its first round."""
    settings: dict[str, Any] = {"algorithm__name": "scaffold", "local__lr": 1e-9, **EVERYONE}
    before = RunFolder(federation(rounds=1, federation__sites=2, **settings).path).final_state().server["c"]
    received: list[torch.Tensor] = []

    def remember(node: int, reply: Any) -> Any:
        return reply

    from keel.deploy.sites import Sites

    request = Sites.request_replies

    def spy(self: Sites, kind: str, round: int, requests: Any, tensors: Any, bounds: Any) -> Any:
        received.append(tensors["c"].clone())
        return request(self, kind, round, requests, tensors, bounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sites, "request_replies", spy)
        federation(remember, rounds=2, federation__sites=3, **settings)
    assert torch.allclose(received[0], before * (9 + 4) / (9 + 4 + 14), atol=1e-8)


@pytest.mark.parametrize("change", [{"federation__sites": 3}, {"federation__left": "1"}])
def test_members_of_a_private_run_do_not_change(federation: InProcessFederation, change: dict[str, Any]) -> None:
    """The account counts the participations of the present members, from the first round on."""
    private = {"privacy__clip": 0.5, "privacy__noise": 1.0, "privacy__delta": 1e-5}
    federation(rounds=1, federation__sites=2, **private)
    settings = {"federation__sites": 2, **change}
    with pytest.raises(KeelError, match=r"federation\.sites and federation\.left must stay as they are"):
        federation(rounds=2, **settings, **private)


def test_a_site_that_never_joined_cannot_leave(federation: InProcessFederation) -> None:
    with pytest.raises(KeelError, match=r"federation\.left names site 2, which never joined"):
        federation(federation__left="2")
