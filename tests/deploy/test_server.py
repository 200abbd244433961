"""A federation in one process has the bits of `serial`, and no answer of a site can spoil it."""

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keel import KeelError
from keel.algorithms import REGISTRY
from keel.runs.folder import RunFolder

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from keel.deploy import messages, sites
from keel.deploy.check import OneProcess, Post
from keel.deploy.memory import SiteMemory
from keel.deploy.settings import read_settings
from tests.deploy.in_one_process import SIZES, InOneProcess, held_by, network, serial

NAMES = sorted(set(REGISTRY) - {"centralized"})


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_the_bits_and_the_bytes_of_serial(
    name: str, federation: InOneProcess, tmp_path: Path
) -> None:
    there = federation(algorithm__name=name)
    here = serial(tmp_path / "serial", algorithm__name=name)
    assert there.summary["model_sha256"] == here.summary["model_sha256"]
    assert there.records == here.records


def test_buffers_are_averaged_or_stay_as_in_serial(federation: InOneProcess, tmp_path: Path) -> None:
    for policy in "average", "local":
        settings = {"model__buffers": policy, "local__drop_last": True}
        there = federation(model=with_statistics, out=policy, **settings)
        here = serial(tmp_path / f"serial-{policy}", model=with_statistics, **settings)
        assert there.summary["model_sha256"] == here.summary["model_sha256"]
        assert there.records == here.records


def test_a_stopped_server_goes_on_to_the_same_bits(federation: InOneProcess, tmp_path: Path) -> None:
    def die_in_round_three(node: int, reply: Message) -> Message:
        if reply.metadata.group_id == "3" and node == 3:
            raise KeyboardInterrupt
        return reply

    for name in "fedhbm", "scaffold", "mimemom":
        with pytest.raises(KeyboardInterrupt):
            federation(die_in_round_three, out=name, algorithm__name=name, participation__rate=1.0)
        assert len(RunFolder(tmp_path / name).records()) == 2
        resumed = federation(out=name, algorithm__name=name, participation__rate=1.0)
        whole = serial(tmp_path / f"serial-{name}", algorithm__name=name, participation__rate=1.0)
        assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
        assert resumed.records == whole.records


def test_a_finished_run_is_not_run_again(federation: InOneProcess) -> None:
    first = federation()
    again = federation()
    assert again.summary == first.summary
    assert federation.grid.sent == 0


def test_a_folder_of_another_spec_is_refused(federation: InOneProcess) -> None:
    federation()
    with pytest.raises(KeelError, match="another spec"):
        federation(local__lr=0.2)


def test_keel_resume_says_how_a_federation_is_gone_on_with(federation: InOneProcess, keel: Any) -> None:
    path = federation().path
    assert "flwr run" in keel("resume", path).err


def nan(content: RecordDict) -> None:
    arrays = content.array_records[messages.TENSORS]
    data = bytearray(arrays["delta"].data)
    data[:4] = np.float32("nan").tobytes()
    arrays["delta"] = Array("float32", arrays["delta"].shape, messages.RAW, bytes(data))


def wrong_shape(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.zeros(7)})


def wrong_type(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.zeros(39, dtype=torch.float64)})


def too_few_bytes(content: RecordDict) -> None:
    content[messages.TENSORS] = ArrayRecord({"delta": Array("float32", (39,), messages.RAW, b"1234")})


def a_pickle(content: RecordDict) -> None:
    content[messages.TENSORS] = ArrayRecord(
        {"delta": Array("float32", (39,), "pickle", b"cos\nsystem\n(S'false'\ntR.")}
    )


def other_names(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.zeros(39), "more": torch.zeros(39)})


def stale(content: RecordDict) -> None:
    content.config_records[messages.ASKED]["round"] = 1


def of_another_training(content: RecordDict) -> None:
    content.config_records[messages.ASKED]["training"] = "0" * 32


def no_steps(content: RecordDict) -> None:
    content.metric_records[messages.TOLD]["steps"] = 0


def other_steps(content: RecordDict) -> None:
    content.metric_records[messages.TOLD]["steps"] = 10**9


def too_large(content: RecordDict) -> None:
    content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), 3e38)})


def an_infinite_loss(content: RecordDict) -> None:
    content.metric_records[messages.TOLD]["loss"] = float("inf")


def nothing(content: RecordDict) -> None:
    for name in list(content):
        del content[name]


HOSTILE: dict[Callable[[RecordDict], None], str] = {
    nan: "not finite",
    wrong_shape: "shape",
    wrong_type: "float64",
    too_few_bytes: "4 bytes",
    a_pickle: "pickle",
    other_names: "more",
    stale: "stale: of round 1",
    of_another_training: "another training",
    no_steps: "steps",
    other_steps: "steps is 1000000000 instead of 2",
    too_large: "delta is not finite, or too large",
    an_infinite_loss: "loss",
    nothing: "no numbers",
}


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_an_answer_that_does_not_hold_up_is_as_if_it_never_came(
    spoil: Callable[[RecordDict], None], federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def hostile(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.group_id == "2" and reply.metadata.message_type == "train":
            spoil(reply.content)
        return reply

    def silent(node: int, reply: Message) -> Message | None:
        return None if node == 2 and reply.metadata.group_id == "2" else reply

    with caplog.at_level(logging.WARNING):
        spoiled = federation(hostile, out="spoiled", algorithm__name="fedhbm", participation__rate=1.0)
    without = federation(silent, out="without", algorithm__name="fedhbm", participation__rate=1.0)
    assert spoiled.summary["model_sha256"] == without.summary["model_sha256"]
    assert HOSTILE[spoil] in spoiled.records[1]["set_aside"]["1"]
    assert f"round 2: site 1 is set aside: {spoiled.records[1]['set_aside']['1']}" in caplog.text
    assert without.records[1]["set_aside"] == {"1": "late: no answer in 0.3 s"}
    assert spoiled.records[1]["cohort"] == [2, 0]
    assert "set_aside" not in spoiled.records[2]


BYTES: dict[str, tuple[type[ConfigRecord | ArrayRecord], bytes]] = {
    "DecodeError": (ConfigRecord, b"ConfigRecord  4\x00\xff\xff\xff\xff"),
    "AttributeError": (ArrayRecord, b"ArrayRecord  2\x00[]"),
    "RecursionError": (ArrayRecord, b"ArrayRecord  100000\x00" + b"[" * 100000),
}


@pytest.mark.parametrize("error", BYTES)
def test_bytes_that_flower_cannot_read_set_their_site_aside(
    error: str, federation: InOneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower reads an answer when it is pulled."""
    spoiled: list[str] = []

    def remember(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.group_id == "2":
            spoiled.append(reply.metadata.reply_to_message_id)
        return reply

    def pull(self: OneProcess, numbers: Iterable[str]) -> Iterable[Message]:
        if set(numbers) & set(spoiled):
            kind, content = BYTES[error]
            kind.inflate(content)
        return whole(self, numbers)

    whole = OneProcess.pull_messages
    monkeypatch.setattr(OneProcess, "pull_messages", pull)
    run = federation(remember, participation__rate=1.0)
    assert run.status == "finished"
    assert f"broken: {error}" in run.records[1]["set_aside"]["1"]


def test_a_lost_connection_is_nobodys_answer(federation: InOneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(self: OneProcess, numbers: Iterable[str]) -> Iterable[Message]:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(OneProcess, "pull_messages", pull)
    with pytest.raises(httpx.ConnectError):
        federation()


def test_a_report_that_was_set_aside_leaves_no_trace_in_the_sites_memory(
    federation: InOneProcess, tmp_path: Path
) -> None:
    """Site 1 trained in round 2 and kept what it then knew, but its report was late: round 3 builds on round 1."""
    federation(late_in_round_two, algorithm__name="scaffold", participation__rate=1.0, rounds=2)
    (folder,) = (tmp_path / "site-1").iterdir()
    kept = SiteMemory(folder.parent, folder.name)
    assert kept.of(1) is not None
    assert kept.of(2) is not None
    run = federation(late_in_round_two, out="longer", algorithm__name="scaffold", participation__rate=1.0, rounds=3)
    saved = RunFolder(run.path).saved_position()
    assert saved is not None
    assert [int(saved.memories[client]["keel.round"]) for client in range(3)] == [3, 3, 3]
    assert sorted(f.name for f in (tmp_path / "site-1").glob("*/memory-*") if f.parent != folder) == [
        "memory-1.safetensors",
        "memory-3.safetensors",
    ]


def late_in_round_two(node: int, reply: Message) -> Message | None:
    return None if node == 2 and reply.metadata.group_id == "2" else reply


def test_a_site_that_lost_its_disk_joins_as_a_new_one(
    federation: InOneProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lose_after_round_two(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.group_id == "2":
            shutil.rmtree(tmp_path / "site-2")
        return reply

    run = federation(lose_after_round_two, algorithm__name="scaffold", participation__rate=1.0)
    assert run.status == "finished"
    assert "site 2 has lost its memory, and joins as a new one" in caplog.text
    assert "the server's c keeps what it was of site 2" in caplog.text
    assert all("set_aside" not in record for record in run.records)


def test_a_site_that_fails_is_named_and_what_its_error_says_stays_there(
    federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    calls = {0: 0, 1: 0, 2: 0}

    def fails_later(node: dict[str, int]) -> Any:
        calls[node["site"]] += 1
        if node["site"] == 0 and calls[0] == 3:
            raise ValueError("could not convert 'Jane Doe' to a number")
        return held_by(node["site"])

    run = federation(data=fails_later, participation__rate=1.0)
    assert run.records[1]["set_aside"] == {"0": "RuntimeError: ValueError, of which the site's log says more"}
    assert [r.levelname for r in caplog.records if "Jane Doe" in (r.exc_text or "")] == ["ERROR"]


def test_in_the_first_phase_too_a_round_goes_on_with_those_who_answer(federation: InOneProcess) -> None:
    def silent(node: int, reply: Message) -> Message | None:
        return None if node == 1 and reply.metadata.message_type == "train.probe" else reply

    run = federation(silent, algorithm__name="mimemom", participation__rate=1.0)
    assert run.status == "finished"
    assert [record["cohort"] for record in run.records] == [[2, 1]] * 4


def test_a_round_with_too_few_answers_is_asked_for_again(federation: InOneProcess, tmp_path: Path) -> None:
    """And since a site builds on the round that counted last, the second answer is the first one."""
    seen: list[int] = []

    def once_silent(node: int, reply: Message) -> Message | None:
        if node != 1 and reply.metadata.group_id == "2":
            seen.append(node)
            return None if seen.count(node) == 1 else reply
        return reply

    settings: dict[str, Any] = {"algorithm__name": "fedhbm", "participation__rate": 1.0}
    run = federation(once_silent, federation__least=3, **settings)
    assert run.summary["model_sha256"] == serial(tmp_path / "serial", **settings).summary["model_sha256"]


def test_without_enough_sites_the_run_stops_and_can_be_gone_on_with(federation: InOneProcess) -> None:
    def gone(node: int, reply: Message) -> Message | None:
        return None if reply.metadata.group_id == "3" else reply

    with pytest.raises(KeelError, match=r"round 3: 0 usable answers .* flwr run goes on"):
        federation(gone, federation__timeout=0.05, federation__wait=0.1)
    assert federation().status == "finished"


def test_sites_evaluate_where_the_server_has_no_test_examples(federation: InOneProcess) -> None:
    run = federation(data=lambda node: (held_by(node["site"]), held_by(node["site"])), test=None, rounds=2)
    whole = federation(out="whole", rounds=2)
    assert run.records[-1]["accuracy"] == whole.records[-1]["accuracy"]
    assert run.records[-1]["test_loss"] == pytest.approx(whole.records[-1]["test_loss"])
    assert "class_accuracy" not in run.records[-1]
    assert run.records[-1]["bytes_evaluation"] == 3 * 4 * run.summary["parameters"]
    assert (run.path / "model.safetensors").is_file()


def test_nobody_tests_where_nobody_can(federation: InOneProcess) -> None:
    run = federation(test=None, rounds=2)
    assert run.status == "finished"
    assert "accuracy" not in run.records[-1]


def test_a_site_with_another_model_is_refused(federation: InOneProcess) -> None:
    built: list[nn.Module] = []

    def changing() -> nn.Module:
        built.append(network())
        with torch.no_grad():
            next(built[-1].parameters()).add_(len(built) == 3)
        return built[-1]

    with pytest.raises(KeelError, match="site 1: its model starts as"):
        federation(model=changing)


def test_a_training_does_not_begin_without_all_sites(federation: InOneProcess, tmp_path: Path) -> None:
    def broken(node: dict[str, int]) -> Any:
        if node["site"] == 1:
            raise FileNotFoundError("patients.csv")
        return held_by(node["site"])

    with pytest.raises(KeelError, match="site 1 did not come"):
        federation(data=broken)
    assert not (tmp_path / "run").exists()


def test_two_nodes_cannot_be_the_same_site(federation: InOneProcess, caplog: pytest.LogCaptureFixture) -> None:
    def twice(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.message_type == "query":
            reply.content.config_records[messages.TOLD]["site"] = 1
        return reply

    with pytest.raises(KeelError, match="site 2 did not come"):
        federation(twice)
    assert "calls itself site 1, which another node is" in caplog.text


def test_a_site_whose_node_has_become_another_is_found_again(federation: InOneProcess, tmp_path: Path) -> None:
    """With a new key a restarted node has a new number: the old one is still there for a while."""
    run = federation(
        becoming_another(federation), algorithm__name="fedhbm", participation__rate=1.0, federation__rebind=True
    )
    whole = serial(tmp_path / "serial", algorithm__name="fedhbm", participation__rate=1.0)
    assert run.summary["model_sha256"] == whole.summary["model_sha256"]


def becoming_another(federation: InOneProcess) -> Post:
    def restart(node: int, reply: Message) -> Message:
        nodes = federation.grid.nodes
        if node == 3 and reply.metadata.group_id == "1":
            nodes[9] = dict(nodes[3])
        if reply.metadata.group_id == "2":
            nodes.pop(3, None)
        return reply

    return restart


def test_a_site_is_the_node_that_the_training_began_with(
    federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    run = federation(becoming_another(federation), participation__rate=1.0)
    assert [list(record.get("set_aside", {})) for record in run.records] == [[], [], ["2"], ["2"]]
    assert "node 9 is set aside: calls itself site 2, which is node 3" in caplog.text


def dying_in(round: str) -> Callable[[int, Message], Message]:
    """The server is stopped in the middle of that round."""

    def die(node: int, reply: Message) -> Message:
        if reply.metadata.group_id == round:
            raise KeyboardInterrupt
        return reply

    return die


def test_after_a_restart_of_the_server_too_a_site_is_its_node(
    federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def swapped(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "query" and node < 3:
            reply.content.config_records[messages.TOLD].update(
                site=2 - node, examples=SIZES[2 - node]
            )  # node 1 says that it is site 1, and node 2 that it is site 0
        return reply

    with pytest.raises(KeyboardInterrupt):
        federation(dying_in("3"), participation__rate=1.0)
    resumed = federation(swapped, participation__rate=1.0)
    assert [record["cohort"] for record in resumed.records] == [[2, 0, 1], [2, 0, 1], [2], [2]]
    assert "calls itself site 1, which is node 2" in caplog.text


def test_a_site_that_comes_back_with_other_data_is_set_aside(
    federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        federation(dying_in("2"), participation__rate=1.0)
    resumed = federation(data=lambda node: held_by((1, 1, 2)[node["site"]]), participation__rate=1.0)
    assert resumed.records[-1]["set_aside"] == {"0": "is not connected"}
    assert "site 0: examples is 4, but the training began with 9" in caplog.text


def test_a_site_answers_only_what_its_own_number_is_asked(federation: InOneProcess) -> None:
    def mislead(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.group_id == "1":
            federation.grid.nodes[3]["site"] = 1
        return reply

    run = federation(mislead, participation__rate=1.0)
    assert "this is 1, but 2 was asked" in run.records[1]["set_aside"]["2"]


def test_a_site_that_could_not_say_who_it_is_is_asked_again(
    federation: InOneProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def mounted_later(node: dict[str, int]) -> Any:
        tries.append(node["site"])
        if node["site"] == 1 and tries.count(1) == 1:
            raise FileNotFoundError("patients.csv")
        return held_by(node["site"])

    monkeypatch.setattr(sites, "TELL_SECONDS", 0.0)
    assert federation(data=mounted_later, participation__rate=1.0).status == "finished"
    assert "node 2 is set aside: RuntimeError: FileNotFoundError" in caplog.text


def test_a_report_above_the_largest_norm_is_set_aside(federation: InOneProcess) -> None:
    def larger(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.group_id == "2":
            reply.content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), 1e6)})
        return reply

    run = federation(larger, participation__rate=1.0, federation__largest_norm=100)
    assert run.status == "finished"
    assert "above 100 (federation.largest_norm)" in run.records[1]["set_aside"]["1"]


def test_a_round_that_is_not_finite_is_not_saved_and_the_run_goes_on_from_the_one_before(
    federation: InOneProcess, tmp_path: Path
) -> None:
    """Each report of round 3 is finite, but three together are not."""

    def wreck(node: int, reply: Message) -> Message:
        if reply.metadata.group_id == "3":
            delta = torch.zeros(39)
            delta[0] = 1.5e19
            reply.content[messages.TENSORS] = messages.pack({"delta": delta})
        return reply

    settings: dict[str, Any] = {"participation__rate": 1.0, "server__lr": 2.0}
    with pytest.raises(KeelError, match=r"round 3: .* not finite any more; .* the same flwr run goes on"):
        federation(wreck, **settings)
    folder = RunFolder(tmp_path / "run")
    saved = folder.saved_position()
    assert saved is not None
    assert saved.round == len(folder.records()) == 2
    resumed = federation(**settings)
    assert resumed.summary["model_sha256"] == serial(tmp_path / "serial", **settings).summary["model_sha256"]


def test_a_full_disk_says_how_a_federation_is_gone_on_with(
    federation: InOneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, position: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(RunFolder, "save", full)
    with pytest.raises(OSError, match="no space left; what was saved is kept: the same flwr run goes on"):
        federation()


def test_a_model_that_a_kill_left_unwritten_is_written_by_the_next_run(federation: InOneProcess) -> None:
    path = federation().path / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    federation()
    assert path.read_bytes() == content


DESCRIBED: dict[str, tuple[dict[str, Any], str]] = {
    "huge shape": ({"shape": [10**6, 10**6]}, "site 1: shape is"),
    "negative shape": ({"shape": [-5]}, "site 1: shape is"),
    "huge count": ({"examples": 10**15}, "site 1: examples is"),
    "bool": ({"examples": True}, "site 1: examples is True"),
    "classes": ({"classes": 10**12}, "site 1: classes is"),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_a_description_beyond_all_bounds_is_refused(
    case: str, federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    told, message = DESCRIBED[case]

    def lie(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "query":
            reply.content.config_records[messages.TOLD].update(told)
        return reply

    with pytest.raises(KeelError, match="site 1 did not come"):
        federation(lie)
    assert message in caplog.text


def test_buffers_that_the_model_does_not_have_are_refused(federation: InOneProcess) -> None:
    def lie(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "query":
            reply.content.config_records[messages.TOLD]["moving"] = ["ghost"]
        return reply

    with pytest.raises(KeelError, match=r"site 0: moving \['ghost'\]"):
        federation(lie)


def test_a_site_may_have_more_examples_than_the_server_has_room_for(federation: InOneProcess) -> None:
    """The server has no table of them; here the one that says so is set aside, for its steps do not fit."""

    def lie(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "query":
            reply.content.config_records[messages.TOLD]["examples"] = 10**12
        return reply

    run = federation(lie, participation__rate=1.0)
    assert all("steps is 2 instead of 500000000000" in record["set_aside"]["1"] for record in run.records)


EVALUATIONS: dict[str, dict[str, Any]] = {
    "counted": {"counted": 10**6},
    "loss": {"loss": -5.0},
    "right": {"right": 10**6},
}


@pytest.mark.parametrize("told", EVALUATIONS.values(), ids=list(EVALUATIONS))
def test_an_evaluation_that_cannot_be_is_set_aside(
    told: dict[str, Any], federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "evaluate":
            reply.content.metric_records[messages.TOLD].update(told)
        return reply

    federation(lie, data=lambda node: (held_by(node["site"]), held_by(node["site"])), test=None, rounds=1)
    assert "evaluation: site 1 is set aside" in caplog.text


def test_an_evaluation_of_an_earlier_round_is_set_aside(
    federation: InOneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(node: int, reply: Message) -> Message:
        if node == 2 and reply.metadata.message_type == "evaluate":
            reply.content.config_records[messages.ASKED]["round"] = 1
        return reply

    federation(stale, data=lambda node: (held_by(node["site"]), held_by(node["site"])), test=None, rounds=2)
    assert "evaluation: site 1 is set aside: stale: of round 1" in caplog.text


def test_the_momentum_of_a_site_goes_by_the_rounds_it_was_away() -> None:
    config = {"federation.sites": 3, "federation.out": "-"}
    for name in "fedhbm", "localghbm":
        spec, _ = read_settings({**config, "algorithm.name": name})
        assert spec.algorithm.settings()["tau_i"] == "actual"
        spec, _ = read_settings({**config, "algorithm.name": name, "algorithm.tau_i": "expected"})
        assert spec.algorithm.settings()["tau_i"] == "expected"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"federation__sites": 0}, r"federation\.sites"),
        ({"federation__leest": 2}, "did you mean 'least'"),
        ({"data__name": "digits"}, r"data\.name"),
        ({"algorithm__name": "centralized"}, "one place"),
        ({"evaluation__on": "validation"}, r"evaluation\.on"),
        ({"engine__name": "ray"}, r"engine\.name"),
        ({"federation__largest_norm": 0}, "largest_norm"),
        ({"local__lrr": 1.0}, "did you mean 'lr'"),
    ],
)
def test_wrong_settings_are_refused(federation: InOneProcess, config: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        federation(**config)


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
