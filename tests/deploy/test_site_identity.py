"""The server checks which node is which site, and that a site reconnects with the same node, data and model."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Message

from keel.deploy import messages, sites
from keel.deploy.flower_adapter import InProcessGrid, ReplyFilter
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app
from tests.deploy.in_process import CONFIG, SIZES, InProcessFederation, network, run_serial, site_examples


def test_a_training_does_not_start_without_all_sites(federation: InProcessFederation, tmp_path: Path) -> None:
    def site_1_fails(node: dict[str, int]) -> Any:
        if node["site"] == 1:
            raise FileNotFoundError("patients.csv")
        return site_examples(node["site"])

    with pytest.raises(KeelError, match="site 1 did not connect"):
        federation(data=site_1_fails)
    assert not (tmp_path / "run").exists()


def test_a_site_that_could_not_identify_itself_is_asked_again(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads: list[int] = []

    def mounted_later(node: dict[str, int]) -> Any:
        loads.append(node["site"])
        if node["site"] == 1 and loads.count(1) == 1:
            raise FileNotFoundError("patients.csv")
        return site_examples(node["site"])

    monkeypatch.setattr(sites, "RETRY_SECONDS", 0.0)
    run = federation(data=mounted_later, participation__rate=1.0, federation__wait_seconds=30, rounds=1)
    assert run.status == "finished"
    assert "rejected: data: FileNotFoundError; run keel deploy doctor at the site" in caplog.text


class SlowGrid(InProcessGrid):
    """A grid on which the answer to a query arrives only after several polls. It counts the queries."""

    def __init__(self, nodes: int):
        app = client_app(network, lambda node: site_examples(node["site"]))
        super().__init__(app, [{"site": site, "device": "cpu"} for site in range(nodes)])
        self.polls = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.polls += 1
        return super().pull_messages(message_ids) if self.polls > 3 else []


def test_an_answer_that_arrives_after_its_round_identifies_the_node(tmp_path: Path) -> None:
    spec, federation = read_settings({**CONFIG, "federation.out": str(tmp_path), "federation.timeout_seconds": 60.0})
    grid = SlowGrid(1)
    reached = sites.Sites(grid, federation, {"spec": spec.to_toml(), "training": "1"})
    for round in range(4):
        assert not reached.nodes, f"identified in round {round}"
        reached.identify_nodes(0.0)
    assert reached.nodes == {0: 1}
    assert grid.messages_sent == 1, "a node with an open query is not asked again"


def test_a_node_that_does_not_answer_is_asked_again_after_the_timeout(tmp_path: Path) -> None:
    spec, federation = read_settings({**CONFIG, "federation.out": str(tmp_path), "federation.timeout_seconds": 0.01})
    grid = SlowGrid(1)
    reached = sites.Sites(grid, federation, {"spec": spec.to_toml(), "training": "1"})
    for _ in range(4):
        reached.identify_nodes(0.0)
        time.sleep(0.01)
    assert reached.nodes == {0: 1}
    assert grid.messages_sent == 4


def test_two_nodes_cannot_be_the_same_site(federation: InProcessFederation, caplog: pytest.LogCaptureFixture) -> None:
    def claim_site_1(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.message_type == "query":
            reply.content.config_records[messages.REPLY]["site"] = 1
        return reply

    with pytest.raises(KeelError, match="site 2 did not connect"):
        federation(claim_site_1)
    assert "node 3 (missing: site 2) rejected: claims to be site 1, but node 2 is that site" in caplog.text


def new_node_for_site_2(federation: InProcessFederation) -> ReplyFilter:
    """Site 2 gets a new key, and so a new node ID, in round 1. Its old node stays online until round 2."""

    def restart(node: int, reply: Message) -> Message:
        nodes = federation.grid.node_configs
        if node == 3 and reply.metadata.group_id == "1":
            nodes[9] = dict(nodes[3])
        if reply.metadata.group_id == "2":
            nodes.pop(3, None)
        return reply

    return restart


def test_a_site_with_a_new_key_is_accepted_if_new_keys_are_allowed(
    federation: InProcessFederation, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"algorithm__name": "fedhbm", "participation__rate": 1.0}
    run = federation(new_node_for_site_2(federation), federation__allow_new_keys=True, **settings)
    serial = run_serial(tmp_path / "serial", **settings)
    assert run.summary["model_sha256"] == serial.summary["model_sha256"]


def test_a_site_with_a_new_key_is_rejected_by_default(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    run = federation(new_node_for_site_2(federation), participation__rate=1.0)
    assert [list(record.get("dropped", {})) for record in run.records] == [[], [], ["2"], ["2"]]
    assert "rejected: claims to be site 2, but the run started with node 3" in caplog.text


def stop_server_in(round: str) -> Callable[[int, Message], Message]:
    def stop(node: int, reply: Message) -> Message:
        if reply.metadata.group_id == round:
            raise KeyboardInterrupt
        return reply

    return stop


def test_a_site_stays_bound_to_its_node_after_a_restart_of_the_server(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def swap_sites_0_and_1(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "query" and node < 3:
            claim = 2 - node
            reply.content.config_records[messages.REPLY].update(site=claim, examples=SIZES[claim])
        return reply

    with pytest.raises(KeyboardInterrupt):
        federation(stop_server_in("3"), participation__rate=1.0)
    resumed = federation(swap_sites_0_and_1, participation__rate=1.0)
    assert [record["cohort"] for record in resumed.records] == [[2, 0, 1], [2, 0, 1], [2], [2]]
    assert "claims to be site 1, but the run started with node 2" in caplog.text


def test_a_site_that_comes_back_with_other_data_is_rejected(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        federation(stop_server_in("2"), participation__rate=1.0, rounds=2)
    resumed = federation(data=lambda node: site_examples((1, 1, 2)[node["site"]]), participation__rate=1.0, rounds=2)
    assert resumed.records[-1]["dropped"] == {"0": "not connected"}
    assert "site 0: examples is 4, but the run started with 9" in caplog.text


def test_a_site_answers_only_requests_for_its_number(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def renumber(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.group_id == "1":
            federation.grid.node_configs[3]["site"] = 1
        return reply

    run = federation(renumber, participation__rate=1.0, rounds=2)
    assert run.records[1]["dropped"]["2"] == "internal: KeelError"
    assert "this is site 1, but the request is for site 2" in caplog.text


DESCRIPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "huge shape": ({"shape": [10**6, 10**6]}, "site 1: shape must"),
    "negative shape": ({"shape": [-5]}, "site 1: shape must"),
    "huge count": ({"examples": 10**15}, "site 1: examples must"),
    "bool": ({"examples": True}, "site 1: examples must be an integer from 1 to 1099511627776 (got True)"),
    "classes": ({"classes": 10**12}, "site 1: classes must"),
    "examples above the bound": ({"examples": 10**8}, "site 1: examples is 100000000, above federation.max_examples"),
    "tests above the bound": ({"test_examples": 10**8}, "site 1: test_examples is 100000000, above"),
    "no fingerprint": ({"fingerprint": ""}, "site 1: fingerprint must be a fingerprint of the data"),
    "fingerprint as a long text": ({"fingerprint": "a" * 10**6}, "site 1: fingerprint must"),
    "other app than site 0": ({"app": "b" * 64}, "site 1 has approved the app bbbbbbbbbbbb, site 0 has approved aaaa"),
    "older Keel": ({"keel": "0.0.1"}, "site 1 has 0.0.1; upgrade site 1"),
    "newer Flower": ({"flower": "99.1.0"}, "site 1 has 99.1.0; upgrade the server"),
    "no version": ({"torch": "?"}, "site 1: torch must be a version"),
    "large description": ({"moving": ["x" * 1000] * 2000}, "oversize"),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_description_out_of_range_is_rejected(
    case: str, federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    fields, message = DESCRIPTIONS[case]

    def falsify(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "query":
            reply.content.config_records[messages.REPLY].update({"app": "a" * 64} | (fields if node == 2 else {}))
        return reply

    with pytest.raises(KeelError, match="site 1 did not connect"):
        federation(falsify)
    assert message in caplog.text


def test_buffers_that_the_model_does_not_have_are_rejected(federation: InProcessFederation) -> None:
    def falsify(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "query":
            reply.content.config_records[messages.REPLY]["moving"] = ["ghost"]
        return reply

    with pytest.raises(KeelError, match=r"site 0 reports running buffers .* does not have: ghost; model\(\) must"):
        federation(falsify)


def test_a_large_number_of_examples_costs_the_server_no_memory(federation: InProcessFederation) -> None:
    """The server keeps no table of the examples. It drops the site, because its number of steps does not match."""

    def falsify(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "query":
            reply.content.config_records[messages.REPLY]["examples"] = 10**12
        return reply

    run = federation(falsify, participation__rate=1.0, rounds=2, federation__max_examples=10**12)
    assert all("steps is 2; expected 500000000000" in record["dropped"]["1"] for record in run.records)
