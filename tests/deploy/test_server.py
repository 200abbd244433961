"""A federation in one process: bit-identical to `serial`, resumable, and evaluated on the server or at the sites."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keel import KeelError
from keel.algorithms import REGISTRY
from keel.runs.folder import RunFolder

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

import httpx
from flwr.app import Message

from keel.deploy import messages
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.site_state import SiteState
from tests.deploy.in_process import InProcessFederation, network, run_serial, site_examples

ALGORITHMS = sorted(set(REGISTRY) - {"centralized"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_the_bits_and_bytes_of_serial(
    name: str, federation: InProcessFederation, tmp_path: Path
) -> None:
    federated = federation(algorithm__name=name)
    serial = run_serial(tmp_path / "serial", algorithm__name=name)
    assert federated.summary["model_sha256"] == serial.summary["model_sha256"]
    assert federated.records == serial.records


@pytest.mark.parametrize("policy", ["average", "local"])
def test_buffers_are_treated_as_in_serial(policy: str, federation: InProcessFederation, tmp_path: Path) -> None:
    def with_batch_norm() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    settings = {"model__buffers": policy, "local__drop_last": True}
    federated = federation(model=with_batch_norm, **settings)
    serial = run_serial(tmp_path / "serial", model=with_batch_norm, **settings)
    assert federated.summary["model_sha256"] == serial.summary["model_sha256"]
    assert federated.records == serial.records


def test_only_adapters_are_sent(federation: InProcessFederation, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="requires the extra 'lora'")

    def with_adapters() -> nn.Module:
        return peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))

    federated = federation(model=with_adapters)
    serial = run_serial(tmp_path / "serial", model=with_adapters)
    assert federated.summary["model_sha256"] == serial.summary["model_sha256"]
    assert federated.records == serial.records
    assert federated.records[0]["bytes_up"] == 2 * 4 * (2 * (5 + 4) + 4 * 3 + 3)  # two sites


KEPT_ADAMW = {"local__optimizer": "adamw", "local__optimizer_state": "keep", "local__lr": 0.01}


@pytest.mark.parametrize(
    ("name", "local"),
    [("fedhbm", {}), ("scaffold", {}), ("mimemom", {}), ("fedavg", KEPT_ADAMW), ("fedhbm", KEPT_ADAMW)],
)
def test_a_stopped_server_resumes_to_the_same_bits(
    name: str, local: dict[str, Any], federation: InProcessFederation, tmp_path: Path
) -> None:
    def stop_in_round_3(node: int, reply: Message) -> Message:
        if reply.metadata.group_id == "3" and node == 3:
            raise KeyboardInterrupt
        return reply

    settings: dict[str, Any] = {"algorithm__name": name, "participation__rate": 1.0, **local}
    with pytest.raises(KeyboardInterrupt):
        federation(stop_in_round_3, **settings)
    assert len(RunFolder(tmp_path / "run").records()) == 2
    resumed = federation(**settings)
    serial = run_serial(tmp_path / "serial", **settings)
    assert resumed.summary["model_sha256"] == serial.summary["model_sha256"]
    assert resumed.records == serial.records


def test_a_federation_stops_early_in_the_round_in_which_serial_does(
    federation: InProcessFederation, tmp_path: Path
) -> None:
    settings = {"stop__patience": 1, "stop__min_delta": 0.5, "evaluation__every": 1, "rounds": 6}
    federated = federation(**settings)
    serial = run_serial(tmp_path / "serial", **settings)
    assert federated.status == serial.status == "stopped"
    assert federated.records == serial.records
    assert federation(**settings).summary == federated.summary
    assert federation.grid.messages_sent == 0


def test_a_finished_run_is_not_repeated_but_its_missing_model_file_is_written(federation: InProcessFederation) -> None:
    first = federation()
    model_file = first.path / "model.safetensors"
    content = model_file.read_bytes()
    model_file.unlink()  # as if the server had been killed after the last round
    again = federation()
    assert again.summary == first.summary
    assert federation.grid.messages_sent == 0
    assert model_file.read_bytes() == content


def test_the_folder_of_another_spec_is_rejected_and_keel_resume_refers_to_flwr_run(
    federation: InProcessFederation, keel: Any
) -> None:
    path = federation(rounds=1).path
    with pytest.raises(KeelError, match="another spec"):
        federation(rounds=1, local__lr=0.2)
    assert "flwr run" in keel("resume", path).err


def test_a_lost_connection_stops_the_run(federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(self: InProcessGrid, message_ids: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(InProcessGrid, "pull_messages", pull)
    with pytest.raises(httpx.ConnectError):
        federation()


def test_a_dropped_report_does_not_change_the_client_state_that_the_site_continues_from(
    federation: InProcessFederation, tmp_path: Path
) -> None:
    """Site 1 trains in round 2 and saves its state, but its report is late: in round 3 it continues from round 1."""

    def late_in_round_2(node: int, reply: Message) -> Message | None:
        return None if node == 2 and reply.metadata.group_id == "2" else reply

    settings: dict[str, Any] = {"algorithm__name": "scaffold", "participation__rate": 1.0}
    federation(late_in_round_2, rounds=2, **settings)
    (folder,) = (path for path in (tmp_path / "site-1").iterdir() if path.is_dir())
    state = SiteState(folder.parent, folder.name)
    assert state.load(1) is not None
    assert state.load(2) is not None
    run = federation(late_in_round_2, out="longer", rounds=3, **settings)
    saved = RunFolder(run.path).checkpoint()
    assert saved is not None
    assert [int(saved.clients[client]["keel.round"]) for client in range(3)] == [3, 3, 3]
    files = (tmp_path / "site-1").glob("*/state-*")
    assert sorted(file.name for file in files if file.parent != folder) == [
        "state-1.safetensors",
        "state-3.safetensors",
    ]


def test_a_site_that_lost_its_disk_joins_as_a_new_one(
    federation: InProcessFederation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def delete_after_round_2(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.group_id == "2":
            shutil.rmtree(tmp_path / "site-2")
        return reply

    run = federation(delete_after_round_2, algorithm__name="scaffold", participation__rate=1.0)
    assert run.status == "finished"
    assert "site 2 has lost its client state and joins as a new one" in caplog.text
    assert "the server's c still contains the lost state of site 2" in caplog.text
    assert all("dropped" not in record for record in run.records)


def test_a_site_that_fails_in_the_first_phase_is_dropped_for_the_round(federation: InProcessFederation) -> None:
    def drop_probe(node: int, reply: Message) -> Message | None:
        return None if node == 1 and reply.metadata.message_type == "train.probe" else reply

    run = federation(drop_probe, algorithm__name="mimemom", participation__rate=1.0)
    assert run.status == "finished"
    assert [record["cohort"] for record in run.records] == [[2, 1]] * 4


def test_a_round_with_too_few_replies_is_repeated_to_the_same_bits(
    federation: InProcessFederation, tmp_path: Path
) -> None:
    """A site continues from the last round that counted, so its second reply equals the dropped first one."""
    replied: list[int] = []

    def drop_first_reply_of_round_2(node: int, reply: Message) -> Message | None:
        if node != 1 and reply.metadata.group_id == "2":
            replied.append(node)
            return None if replied.count(node) == 1 else reply
        return reply

    settings: dict[str, Any] = {"algorithm__name": "fedhbm", "participation__rate": 1.0}
    run = federation(drop_first_reply_of_round_2, federation__min_replies=3, **settings)
    assert sorted(replied) == [2, 2, 3, 3]
    assert run.summary["model_sha256"] == run_serial(tmp_path / "serial", **settings).summary["model_sha256"]


def test_a_run_with_too_few_replies_stops_and_can_be_resumed(federation: InProcessFederation) -> None:
    def drop_round_3(node: int, reply: Message) -> Message | None:
        return None if reply.metadata.group_id == "3" else reply

    with pytest.raises(KeelError, match=r"round 3: 0 valid replies after 5 attempts.* flwr run resumes"):
        federation(drop_round_3)
    assert federation().status == "finished"


def test_a_round_that_is_not_finite_is_not_saved_and_the_run_resumes_from_the_round_before(
    federation: InProcessFederation, tmp_path: Path
) -> None:
    """Each report of round 3 is finite, but their sum is not."""

    def overflow(node: int, reply: Message) -> Message:
        if reply.metadata.group_id == "3":
            delta = torch.zeros(39)
            delta[0] = 1.5e19
            reply.content[messages.TENSORS] = messages.pack({"delta": delta})
        return reply

    settings: dict[str, Any] = {"participation__rate": 1.0, "server__lr": 2.0}
    with pytest.raises(KeelError, match=r"round 3: .*not finite.*flwr run"):
        federation(overflow, **settings)
    folder = RunFolder(tmp_path / "run")
    saved = folder.checkpoint()
    assert saved is not None
    assert saved.round == len(folder.records()) == 2
    resumed = federation(**settings)
    assert resumed.summary["model_sha256"] == run_serial(tmp_path / "serial", **settings).summary["model_sha256"]


def test_the_error_of_a_full_disk_says_how_to_resume(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, state: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(RunFolder, "save", full)
    with pytest.raises(OSError, match=r"no space left.*flwr run"):
        federation()


def test_sites_evaluate_if_the_server_has_no_test_examples(federation: InProcessFederation) -> None:
    at_sites = federation(
        data=lambda node: (site_examples(node["site"]), site_examples(node["site"])), test=None, rounds=2
    )
    on_server = federation(out="on-server", rounds=2)
    record = at_sites.records[-1]
    assert record["accuracy"] == on_server.records[-1]["accuracy"]
    assert record["test_loss"] == pytest.approx(on_server.records[-1]["test_loss"])
    assert "class_accuracy" not in record
    assert record["bytes_evaluation"] == 3 * 4 * at_sites.summary["parameters"]
    assert (at_sites.path / "model.safetensors").is_file()


def test_a_run_without_any_test_examples_has_no_accuracy(federation: InProcessFederation) -> None:
    run = federation(test=None, rounds=2)
    assert run.status == "finished"
    assert "accuracy" not in run.records[-1]


def test_a_site_with_another_initial_model_is_rejected(federation: InProcessFederation) -> None:
    models: list[nn.Module] = []

    def third_differs() -> nn.Module:
        models.append(network())
        with torch.no_grad():
            next(models[-1].parameters()).add_(len(models) == 3)
        return models[-1]

    with pytest.raises(KeelError, match="site 1: the initial model has checksum"):
        federation(model=third_differs)
