"""A real federation on this machine: a SuperLink and three SuperNodes with TLS and keys, as `keel deploy new` writes.

The nodes connect through the proxy where nginx is installed.

Flower starts a process for each message, which takes seconds, so that all tests share one federation and one training.
Ports: free ones of 127.0.0.1 below the ephemeral range, reserved by a lock file; see `processes.py`.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Message
from flwr.proto.fleet_pb2 import PushMessagesResponse

from keel.deploy.approval import read_app
from keel.deploy.audit import verify
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app
from keel.runs.folder import RunFolder
from keel.runs.run import Run
from tests.deploy import federated_app
from tests.deploy.fleet import fleet_client, node_key, pushed, site_credentials
from tests.deploy.in_process import run_serial
from tests.deploy.processes import OFFLINE_SECONDS, Federation
from tests.deploy.three_sites import EXPERIMENT, MALICIOUS_SITE, SITES, new_three_sites, start_node, start_three_sites


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = new_three_sites(tmp_path_factory.mktemp("federation") / "three-sites")
    try:
        start_three_sites(federation)
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def answers_to_replay() -> list[PushMessagesResponse]:
    """What the server answers when a site sends its replies to earlier requests again in round 2."""
    return []


@pytest.fixture(scope="module")
def finished(
    federation: Federation,
    answers_to_replay: list[PushMessagesResponse],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Train with all methods while nodes and the server stop; return the run of FedHBM with `serial`."""
    serial = run_serial(
        tmp_path_factory.mktemp("serial") / "run", **federated_app.method_config(EXPERIMENT, "fedhbm", "unused")
    )
    cohorts = [set(record["cohort"]) for record in serial.records]  # those of MimeMom are the same
    (idle,) = set(range(SITES)) - cohorts[1]
    assert idle in cohorts[0] & cohorts[2], "choose a seed with a site that takes part in rounds 1 and 3, but not in 2"
    assert MALICIOUS_SITE in cohorts[0]
    killed = min(cohorts[0] & cohorts[1])  # it has client state from round 1
    in_round_2, in_round_3 = federation.hold(killed, 2), federation.hold(idle, 3)
    federation.run()

    federation.wait_until(lambda: federation.trains_in(killed, 2), "a message of round 2", during_run=True)
    answers_to_replay.extend(send_again(federation, idle, tmp_path_factory.mktemp("replay")))
    federation.kill(f"site-{killed}")
    in_round_2.unlink()
    kill_time = time.monotonic()
    federation.stop_node(idle)
    start_node(federation, idle)
    start_foreign_nodes(federation, tmp_path_factory.mktemp("foreign"))
    # Restarted earlier, the node could connect before the server notices that it lost the request.
    time.sleep(max(0.0, kill_time + OFFLINE_SECONDS - time.monotonic()))
    start_node(federation, killed)

    federation.wait_until(lambda: federation.trains_in(idle, 3), "a message of round 3", during_run=True)
    federation.kill("server")
    in_round_3.unlink()
    assert len(federation.records("fedhbm")) == 2
    federation.start_server()
    # Both were receiving or training for the killed server's run. A SuperNode that lost a message while it received it
    # can answer each later request only when the next one arrives.
    for site in sorted(cohorts[2]):
        federation.stop_node(site)
        start_node(federation, site)
    federation.run()

    federation.wait_until(lambda: federation.ended("fedavg"), "the end of all methods", during_run=True)
    return serial


def test_a_training_gives_the_bits_of_serial_after_kills_of_a_node_and_of_the_server(
    federation: Federation, finished: Run
) -> None:
    folder = RunFolder(federation.runs / "fedhbm")
    records, expected = folder.records(), finished.records
    repeated = records[1]["bytes_down"] - expected[1]["bytes_down"]  # the request to the killed node is sent again
    assert repeated > 0
    assert repeated % (4 * finished.summary["parameters"]) == 0
    expected[1]["bytes_down"] += repeated
    assert records == expected
    assert (folder.summary or {})["model_sha256"] == finished.summary["model_sha256"]


def test_restarted_nodes_continue_with_their_client_state(federation: Federation, finished: Run) -> None:
    log = federation.run_log()
    assert "resuming after round 2 of 3" in log
    assert "lost its client state" not in log
    assert (federation.folder / "marker-1").exists(), "the sites have imported the approved client app"
    for site in finished.records[2]["cohort"]:
        assert list((federation.folder / "client-state" / f"site-{site}").glob("*/state-3.safetensors"))


def test_the_logs_of_server_and_sites_have_timestamps_and_name_the_site(federation: Federation, finished: Run) -> None:
    time_of_day = r"INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(time_of_day, federation.log("server"))
    for site in range(SITES):
        log = federation.log(f"site-{site}")
        assert re.search(rf"{time_of_day}.*node of site {site}: approved app \w{{64}}, policy /", log)
        assert re.search(rf"{time_of_day}.*Receiving: train message", log)


def send_again(federation: Federation, site: int, folder: Path) -> list[PushMessagesResponse]:
    """Send the replies of a site again through the proxy, with its certificate and its key."""
    credentials = site_credentials(federation, site, folder)
    client = fleet_client(federation, credentials, node_key(federation, site))
    try:
        return [client.PushMessages(request) for request in pushed(federation, site)]
    finally:
        client.close()


def test_replies_that_are_sent_again_are_refused(
    finished: Run, answers_to_replay: list[PushMessagesResponse], federation: Federation
) -> None:
    """That they do not change the model is part of the test of the bits."""
    assert len(answers_to_replay) >= 2  # its description and its report of round 1
    assert all(not answer.objects_to_push for answer in answers_to_replay), "the server asks for no content"
    assert federation.log("server").count("Failed to store Message reply") >= len(answers_to_replay)


def replay_in_process(name: str, folder: Path, drop: Callable[[int, Message], Message | None]) -> Run:
    """Train with one of the methods in one process, without the replies for which `drop` returns None."""
    spec, settings = read_settings(federated_app.method_config(EXPERIMENT, name, folder / "replayed"))
    nodes = [{"site": site, "state-dir": str(folder / f"site-{site}")} for site in range(SITES)]
    grid = InProcessGrid(client_app(federated_app.model, federated_app.site_data), nodes, drop)
    return run_federation(grid, spec, settings, federated_app.model, federated_app.server_tests(name))


def test_a_site_that_sends_nan_is_dropped_as_if_it_had_not_replied(
    federation: Federation, finished: Run, tmp_path: Path
) -> None:
    def drop(node: int, reply: Message) -> Message | None:
        return None if node == MALICIOUS_SITE + 1 and reply.metadata.message_type == "train.probe" else reply

    replayed = replay_in_process("mimemom", tmp_path, drop)
    folder = RunFolder(federation.runs / "mimemom")
    (record,) = folder.records()
    assert list(record["dropped"]) == list(replayed.records[0]["dropped"]) == [str(MALICIOUS_SITE)]
    assert record["dropped"][str(MALICIOUS_SITE)].endswith("is not finite")
    assert (folder.summary or {})["model_sha256"] == replayed.summary["model_sha256"]


def test_a_poisoned_report_and_a_forged_evaluation_change_nothing(
    federation: Federation, finished: Run, tmp_path: Path
) -> None:
    def drop(node: int, reply: Message) -> Message | None:
        honest = node != MALICIOUS_SITE + 1 or reply.metadata.message_type == "query"
        return reply if honest else None

    replayed = replay_in_process("fedavg", tmp_path, drop)
    folder = RunFolder(federation.runs / "fedavg")
    (record,), (expected,) = folder.records(), replayed.records
    assert record["rejected"] == [MALICIOUS_SITE]
    assert record["dropped"][str(MALICIOUS_SITE)].startswith("rejected: the norm of delta is ")
    assert record["evaluation_missing"] == [MALICIOUS_SITE]
    values = "accuracy", "test_loss", "test_examples"
    assert {name: record.get(name) for name in values} == {name: expected.get(name) for name in values}
    assert (folder.summary or {})["model_sha256"] == replayed.summary["model_sha256"]
    audit = federation.runs / "fedavg.audit.jsonl"
    reasons = [line["reason"] for line in map(json.loads, audit.read_text().splitlines()) if line["event"] == "drop"]
    assert f"reports {federated_app.CLAIMED} test examples, but the site joined with 14" in reasons
    assert verify(audit).fault is None


def start_foreign_nodes(federation: Federation, folder: Path) -> None:
    """Start a node with a key that is not registered, and one that trusts another authority than the server's."""
    unknown_key = make_node_key(folder / "unknown").with_suffix("")
    make_certificates(folder / "other", ["127.0.0.1"])
    known_key, authority = federation.folder / "keys" / "site-1", federation.folder / "certificates"
    attempts = {"unknown-key": (unknown_key, authority), "other-authority": (known_key, folder / "other")}
    for (name, (key, ca)), port in zip(attempts.items(), federation.free_ports, strict=False):
        federation.start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{federation.port}", "--max-retries", "1"),
            *("--port", str(port), "--root-certificates", ca / "ca.crt"),
            *("--auth-supernode-private-key", key),
        )


def test_unknown_keys_and_other_authorities_are_rejected(federation: Federation, finished: Run) -> None:
    nodes = [federation.processes[name] for name in ("unknown-key", "other-authority")]
    federation.wait_until(lambda: all(node.poll() is not None for node in nodes), "both nodes stop")
    assert all(node.returncode != 0 for node in nodes)
    assert "No SuperNode found with the given public key" in federation.log("server")
    assert "certificate" in federation.log("other-authority").lower()


def test_an_app_that_differs_from_the_approved_one_by_one_byte_is_refused_before_its_code_runs(
    federation: Federation,
) -> None:
    folder, client = federation.folder, federation.folder / "three_sites" / "client.py"
    client.write_text(client.read_text().replace("marker-1", "marker-2"))
    federation.run("-c", f'federation.out="{folder / "refused"}"')
    federation.wait_until(
        lambda: all("is refused: the approved app is" in federation.log(f"site-{site}") for site in range(SITES)),
        "every site refuses the app",
    )
    federation.wait_until(
        lambda: federation.run_log().count("rejected: approval: AppNotApproved") >= SITES, "the server logs it"
    )
    federation.flwr("stop", federation.last_run, "federation")
    assert not (folder / "marker-2").exists()
    for site in range(SITES):
        assert "is refused: the approved app is" in federation.log(f"site-{site}")
        state = folder / "client-state" / f"site-{site}"
        assert b"marker-2" in read_app((state / "refused.fab").read_bytes()).files["three_sites/client.py"]
        audit = state / "audit.jsonl"
        assert json.loads(audit.read_text().splitlines()[-1])["reason"] == "approval: AppNotApproved"
        assert verify(audit).fault is None
