"""What the server reports about its sites: idle ones, outliers, missing evaluations, changed data; and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Context, Message, RecordDict

from keel.core.records import Record
from keel.deploy import messages
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.server import server_app
from keel.deploy.site import client_app
from keel.deploy.watch import directions, idle_sites, many_examples, outliers
from keel.runs.folder import RunFolder
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


def test_a_site_whose_loss_falls_more_slowly_is_no_outlier() -> None:
    falling = [[0.7, 0.6, 0.4], *([0.3, 0.03, 0.02],) * 10]
    assert outliers(rounds_of("losses", falling)) == {}
    assert outliers(rounds_of("losses", [*falling, *([0.6, 0.03, 0.02],) * 3])) == {"0": {"loss": [12, 13, 14]}}


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


def negate(node: int, reply: Message) -> Message:
    if node == 2 and reply.metadata.message_type == "train":
        delta = messages.unpack_request(reply.content)["delta"]
        reply.content[messages.TENSORS] = messages.pack({"delta": -delta})
    return reply


def test_a_site_that_negates_its_report_is_an_outlier(
    federation: InProcessFederation, keel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    same: dict[str, Any] = {"data": lambda node: site_examples(2), **EVERYONE}
    assert federation(out="honest", rounds=3, **same).summary["outliers"] == {}
    run = federation(negate, rounds=3, **same)
    assert run.summary["outliers"] == {"1": {"direction": [1, 2, 3]}}
    assert "site 1: its report points against those of the other sites since round 1" in caplog.text
    audit = [json.loads(line) for line in run.path.with_name("run.audit.jsonl").read_text().splitlines()]
    assert [line["rounds"] for line in audit if line["event"] == "outlier"] == [[1, 2, 3]]
    called = keel("deploy", "status", str(run.path))
    assert "site 1: its report points against those of the other sites in 3 rounds" in called.out
    assert called.code == 3
    (run.path / "summary.json").unlink()
    with FileLock(run.path / ".lock"):
        running = keel("deploy", "status", str(run.path))
    assert (running.code, running.out.splitlines()[1:]) == (3, called.out.splitlines()[1:])


def test_a_training_that_stops_at_an_outlier_continues_without_the_site(
    federation: InProcessFederation, keel: Any
) -> None:
    options: dict[str, Any] = {"data": lambda node: site_examples(2), "federation__on_outlier": "stop", **EVERYONE}
    with pytest.raises(KeelError, match=r"site 1: its report points against .* since round 1; .*federation\.left"):
        federation(negate, rounds=6, **options)
    folder = federation.folder / "run"
    called = keel("deploy", "status", str(folder))
    assert called.code == 1
    assert "interrupted after 3 of 6 rounds" in called.out
    assert json.loads(folder.with_name("run.audit.jsonl").read_text().splitlines()[-1])["event"] == "failed"
    with pytest.raises(KeelError, match="site 1: its report points against"):  # nothing has changed: it stops again
        federation(negate, rounds=6, **options)
    assert len(RunFolder(folder).records()) == 4
    run = federation(negate, rounds=6, federation__left="1", **options)
    assert run.status == "finished"
    assert [sorted(record["cohort"]) for record in run.records[3:]] == [[0, 1, 2], [0, 2], [0, 2]]


def test_a_training_whose_last_round_has_an_outlier_has_finished(federation: InProcessFederation, keel: Any) -> None:
    run = federation(negate, rounds=3, data=lambda node: site_examples(2), federation__on_outlier="stop", **EVERYONE)
    assert run.status == "finished"
    assert keel("deploy", "status", str(federation.folder / "run")).code == 3


def sixty_times_at(site: int) -> Callable[[Any], Any]:
    """Data of which one site has each example sixty times."""

    def data(node: Any) -> Any:
        inputs, labels = site_examples(node["site"])
        return (inputs.repeat(60, 1), labels.repeat(60)) if node["site"] == site else (inputs, labels)

    return data


def test_a_training_that_stops_at_an_outlier_does_not_start_with_a_site_that_states_far_more_examples(
    federation: InProcessFederation,
) -> None:
    repeated = sixty_times_at(1)
    with pytest.raises(KeelError, match="site 1: it states more than 20 times as many examples"):
        federation(data=repeated, rounds=1, federation__on_outlier="stop", **EVERYONE)
    assert not (federation.folder / "run").exists()
    run = federation(data=repeated, rounds=1, **EVERYONE)
    assert run.status == "finished"


def test_a_training_that_stops_at_an_outlier_does_not_accept_a_later_site_that_states_far_more_examples(
    federation: InProcessFederation,
) -> None:
    repeated = sixty_times_at(2)
    options: dict[str, Any] = {"data": repeated, "federation__on_outlier": "stop", **EVERYONE}
    federation(rounds=1, federation__sites=2, **options)
    with pytest.raises(KeelError, match="site 2: it states more than 20 times as many examples"):
        federation(rounds=2, **options)
    assert len(RunFolder(federation.folder / "run").records()) == 1
    federation(rounds=2, **{**options, "federation__on_outlier": "report"})
    assert federation(rounds=3, **options).status == "finished"  # the operator has accepted the site


def test_directions_do_not_depend_on_the_length_of_a_report() -> None:
    reports = {"0": torch.tensor([1.0, 0.0]), "1": torch.tensor([0.0, 2.0]), "2": torch.tensor([-1000.0, 0.0])}
    half = round(2**-0.5, 6)
    assert directions(reports) == {"0": (-half, 0.0), "1": (0.0, -1.0), "2": (-half, 0.0)}
    assert directions({**reports, "3": torch.zeros(2)}) == directions(reports)
    assert directions({"0": reports["0"], "1": reports["1"], "2": torch.zeros(2)}) == {}


def test_reports_that_all_point_away_from_each_other_are_no_outliers() -> None:
    """As near the end of an honest training, or if each site has other classes."""
    alike = {"cosines": {"0": -0.9, "1": 0.3, "2": 0.3}, "agreements": {"0": 0.5, "1": -0.9, "2": -0.9}}
    apart = {"cosines": {"0": -0.9, "1": -0.5, "2": -0.5}, "agreements": {"0": -0.4, "1": -0.5, "2": -0.5}}

    def records(values: dict[str, Any]) -> list[Any]:
        return [{"round": number, "cohort": [0, 1, 2], **values} for number in (1, 2, 3)]

    assert outliers(records(alike)) == {"0": {"direction": [1, 2, 3]}}
    assert outliers(records(apart)) == {}


def test_a_norm_far_below_the_other_is_an_outlier_also_in_a_cohort_of_two() -> None:
    tiny, usual = {"0": 1.0, "1": 0.04}, {"0": 1.0, "1": 0.06}
    records: list[Any] = [{"round": number, "cohort": [0, 1], "norms": tiny} for number in (1, 2, 3)]
    assert outliers(records) == {"1": {"small norm": [1, 2, 3]}}
    assert outliers([*records[:2], {**records[2], "norms": usual}]) == {}
    huge = {"0": 1.0, "1": 1.0, "2": 1000.0}
    assert outliers([{**record, "norms": huge} for record in records]) == {"2": {"norm": [1, 2, 3]}}


def test_a_site_that_states_far_more_examples_is_an_outlier_from_the_start(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    def repeated(node: Any) -> Any:
        inputs, labels = site_examples(node["site"])
        times = 60 if node["site"] == 1 else 1  # 240 examples; the others have 9 and 14
        return inputs.repeat(times, 1), labels.repeat(times)

    run = federation(data=repeated, rounds=1, **EVERYONE)
    assert run.summary["outliers"] == {"1": {"examples": []}}
    assert "site 1: it states more than 20 times as many examples as the other sites" in caplog.text
    audit = [json.loads(line) for line in run.path.with_name("run.audit.jsonl").read_text().splitlines()]
    assert [(line["site"], line["value"]) for line in audit if line["event"] == "outlier"] == [(1, "examples")]
    assert many_examples([{"site": 0, "examples": 10}, {"site": 1, "examples": 200}]) == []
    assert many_examples([{"site": 0, "examples": 10}]) == []


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
    assert 'keel_dropped_total{site="0"} 0' in lines
    assert (run.path / "metrics.prom").stat().st_mode & 0o777 == 0o644
    assert f'keel_bytes_total{{direction="up"}} {run.summary["bytes_up"]}' in lines
    assert any(line.startswith('keel_loss{site="0"} ') for line in lines)
    other = federation(out="without", rounds=1, federation__metrics_file="")
    assert not (other.path / "metrics.prom").exists()
