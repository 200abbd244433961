"""What the server reports about its sites: idle ones, outliers, missing evaluations, changed data; and where."""

import json
from pathlib import Path
from typing import Any

import pytest

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Context, Message, RecordDict

from keel.core.records import Record
from keel.deploy import messages
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.server import server_app
from keel.deploy.site import client_app
from keel.deploy.watch import idle_sites, outliers
from tests.deploy.in_process import CONFIG, InProcessFederation, network, site_examples

EVERYONE: dict[str, Any] = {"participation__rate": 1.0}


def with_tests(node: Any) -> Any:
    return site_examples(node["site"]), site_examples(node["site"])


def never_site_1(node: int, reply: Message) -> Message | None:
    return None if node == 2 and reply.metadata.group_id != "0" else reply


def test_a_site_that_contributes_nothing_is_reported(
    federation: InProcessFederation, keel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = federation(never_site_1, rounds=4, **EVERYONE)
    assert "site 1 has contributed nothing in 3 rounds: late: no reply within 0.05 s" in caplog.text
    assert run.summary["idle_sites"] == {"1": "no valid reply in 4 rounds: late: no reply within 0.05 s"}
    called = keel("deploy", "status", str(run.path))
    assert called.code == 1
    assert "finished after 4 of 4 rounds" in called.out
    assert "site 1: no valid reply in 4 rounds" in called.out


def test_a_run_with_an_idle_site_fails_in_flower(tmp_path: Path) -> None:
    settings = {**CONFIG, "participation.rate": 1.0, "federation.out": str(tmp_path / "run")}
    nodes = [{"site": n, "state-dir": str(tmp_path / f"site-{n}"), "device": "cpu"} for n in range(3)]
    grid = InProcessGrid(client_app(network, lambda node: site_examples(node["site"])), nodes, never_site_1)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
    with pytest.raises(KeelError, match="finished, but not with all sites: site 1: no valid reply in 4 rounds"):
        server_app(network)(grid, context)
    assert (tmp_path / "run/model.safetensors").is_file()


def test_the_status_of_a_good_and_of_a_failed_training(federation: InProcessFederation, keel: Any) -> None:
    run = federation(rounds=2, **EVERYONE)
    called = keel("deploy", "status", str(run.path))
    assert called.code == 0, called.out
    assert json.loads(keel("deploy", "status", str(run.path), "--json").out)["ok"] is True

    def none_in_round_2(node: int, reply: Message) -> Message | None:
        return None if reply.metadata.group_id == "2" else reply

    with pytest.raises(KeelError):
        federation(none_in_round_2, out="failed", rounds=2, **EVERYONE)
    called = keel("deploy", "status", str(run.path.with_name("failed")))
    assert called.code == 1
    assert "not finished: 1 of 2 rounds" in called.out
    assert "KeelError: round 2: 0 valid replies after 5 attempts" in called.out


def test_a_missing_evaluation_is_recorded_with_the_number_of_examples(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def late(node: int, reply: Message) -> Message | None:
        late = node == 2 and reply.metadata.message_type == "evaluate" and reply.metadata.group_id == "2"
        return None if late else reply

    run = federation(late, data=with_tests, test=None, rounds=3, **EVERYONE)
    assert [record["test_examples"] for record in run.records] == [27, 23, 27]
    assert [record.get("evaluation_missing") for record in run.records] == [None, [1], None]
    assert "of 23 test examples without site 1" in caplog.text


def rounds_of(key: str, values: list[list[float]]) -> list[Record]:
    return [
        {"round": number, "cohort": [0, 1, 2], key: {str(site): value for site, value in enumerate(row)}}  # type: ignore[misc]
        for number, row in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(("key", "name"), [("norms", "norm"), ("losses", "loss")])
def test_a_site_far_outside_for_three_rounds_is_an_outlier(key: str, name: str) -> None:
    far, near = [1.0, 1.2, 9.0], [1.0, 1.2, 3.0]
    assert outliers(rounds_of(key, [far, far, near, far])) == {}
    assert outliers(rounds_of(key, [near, far, far, far])) == {"2": {name: [2, 3, 4]}}


def test_outliers_are_logged_and_in_the_summary(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def inflate(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "train":
            reply.content.metric_records[messages.REPLY]["loss"] = 1e4
        return reply

    run = federation(inflate, rounds=3, **EVERYONE)
    assert run.summary["outliers"] == {"1": {"loss": [1, 2, 3]}}
    assert run.records[0]["losses"]["1"] == 1e4
    assert "site 1: its loss is far above that of the other sites since round 1" in caplog.text


def test_a_site_that_replied_last_is_not_idle() -> None:
    dropped: Record = {"round": 1, "cohort": [0], "dropped": {"1": "late"}}
    replied: Record = {"round": 2, "cohort": [0, 1]}
    assert idle_sites([dropped] * 5 + [replied], 3) == {}
    assert idle_sites([replied] + [dropped] * 2, 3) == {}
    assert idle_sites([replied] + [dropped] * 3, 3) == {"1": "no valid reply in 3 rounds: late"}
    assert idle_sites([dropped], 3) == {"1": "no valid reply in 1 rounds: late"}


def swapped(node: Any) -> Any:
    """The same number of examples, but other ones."""
    inputs, labels = site_examples(node["site"])
    return (inputs.flip(0), labels.flip(0)) if node["site"] == 1 else (inputs, labels)


def test_changed_data_of_the_same_size_are_refused_unless_allowed(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    federation(rounds=1, **EVERYONE)
    run = federation(data=swapped, rounds=2, **EVERYONE)
    assert run.records[-1]["dropped"] == {"1": "not connected"}
    assert "site 1: the data have changed since the site joined" in caplog.text
    run = federation(data=swapped, rounds=3, federation__allow_new_data=True, **EVERYONE)
    assert "dropped" not in run.records[-1]
    audit = [json.loads(line) for line in run.path.with_name("run.audit.jsonl").read_text().splitlines()]
    assert [line["site"] for line in audit if line["event"] == "new data"] == [1]


def test_prometheus_reads_the_state_of_the_training(federation: InProcessFederation) -> None:
    run = federation(never_site_1, rounds=2, **EVERYONE)
    lines = (run.path / "metrics.prom").read_text().splitlines()
    assert "keel_round 2" in lines
    assert 'keel_dropped_total{site="1"} 2' in lines
    assert f'keel_bytes_total{{direction="up"}} {run.summary["bytes_up"]}' in lines
    assert any(line.startswith('keel_loss{site="0"} ') for line in lines)
    other = federation(out="without", rounds=1, federation__metrics_file="")
    assert not (other.path / "metrics.prom").exists()
