"""Trackers: what they were told is what metrics.jsonl says, once, whatever happened on the way."""

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import keel
from keel.reporting.comparison import compare
from keel.runs import run as run_module
from keel.runs import tracking
from keel.runs.batch import read_runs
from keel.runs.folder import RunFolder

ALL = ["tensorboard", "wandb", "mlflow"]
SHORT = {"rounds": 12, "evaluation": {"every": 5, "last": 2}}
Told = list[tuple[str, int, float]]


class Killed(BaseException):
    """Stands for a kill."""


def kill_at(t: int) -> Any:
    def hook(record: dict[str, Any], *_: object) -> None:
        if record["round"] == t:
            raise Killed

    return hook


@pytest.fixture(scope="module")
def twice_killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[keel.Run]:
    """A run with every tracker, killed before it was saved, killed again when it was, then gone on with to its end."""
    path = tmp_path_factory.mktemp("runs") / "run"
    table = {**SHORT, "tracking": {"to": ALL, "project": "boats", "wandb_mode": "offline"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with pytest.raises(Killed):
            keel.run(table, out=path, hooks=[kill_at(4)])
        patch.setattr(run_module, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(run_module, "SAVING_SHARE", 0)
        with pytest.raises(Killed):
            keel.resume(path, hooks=[kill_at(8)])
        yield keel.resume(path)


def expected(run: keel.Run) -> Told:
    names = ("lr", "bytes_down", "bytes_up", "train_loss", "test_loss", "accuracy")
    told = [(name, r["round"], r[name]) for r in run.records for name in names if name in r]
    for record in run.records:
        for label, accuracy in enumerate(record.get("class_accuracy", [])):
            told.append((f"class_accuracy/{label}", record["round"], accuracy))
    return sorted(told)


def events(run: keel.Run) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def offline(run: keel.Run) -> list[Any]:
    """The records of the one offline run of wandb: protocol buffers in a LevelDB log after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    content, at, whole, found = file.read_bytes(), 7, b"", []
    while at < len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block is too short for the head of a chunk
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last chunk of one
            found.append(Record.FromString(whole))
            whole = b""
    return found


def stored(run: keel.Run, query: str) -> list[Any]:
    with sqlite3.connect(run.path.parent / "mlflow.db") as store:
        found = store.execute(query).fetchall()
    store.close()
    return found


def test_tensorboard_has_every_number_once(twice_killed: keel.Run) -> None:
    read = events(twice_killed)
    told = sorted((name, e.step, e.value) for name in read.Tags()["scalars"] for e in read.Scalars(name))
    assert [t[:2] for t in told] == [t[:2] for t in expected(twice_killed)]
    assert [t[2] for t in told] == pytest.approx([t[2] for t in expected(twice_killed)], rel=1e-6)  # float32


def test_wandb_has_every_number_once(twice_killed: keel.Run) -> None:
    told = []
    for record in offline(twice_killed):
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        told += [(name, items["_step"], value) for name, value in items.items() if not name.startswith("_")]
    assert sorted(told) == expected(twice_killed)


def test_mlflow_has_every_number_once(twice_killed: keel.Run) -> None:
    told = stored(twice_killed, "SELECT key, step, value FROM metrics WHERE key NOT LIKE 'summary.%'")
    assert sorted(told) == expected(twice_killed)


def test_each_has_the_spec_and_the_summary_of_one_run(twice_killed: keel.Run) -> None:
    accuracy, sha = twice_killed.accuracy, twice_killed.summary["model_sha256"]

    (summary,) = events(twice_killed).Tensors("summary/text_summary")
    (spec,) = events(twice_killed).Tensors("spec/text_summary")
    assert f"accuracy = {accuracy}" in summary.tensor_proto.string_val[0].decode()
    assert 'name = "ghbm"' in spec.tensor_proto.string_val[0].decode()

    of_wandb = offline(twice_killed)
    (begun,) = [record.run for record in of_wandb if record.HasField("run")]
    assert (begun.run_id, begun.project) == (RunFolder(twice_killed.path).tracked_as["wandb"], "boats")
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["algorithm"]["name"] == "ghbm"
    summaries = {i.key or i.nested_key[0]: i.value_json for record in of_wandb for i in record.summary.update}
    assert json.loads(summaries["summary.accuracy"]) == accuracy

    assert stored(twice_killed, "SELECT name FROM experiments WHERE name != 'Default'") == [("boats",)]
    assert stored(twice_killed, "SELECT name, status FROM runs") == [("run", "FINISHED")]
    assert ("algorithm.name", "ghbm") in stored(twice_killed, "SELECT key, value FROM params")
    assert stored(twice_killed, "SELECT value FROM metrics WHERE key = 'summary.accuracy'") == [(accuracy,)]
    assert stored(twice_killed, "SELECT value FROM tags WHERE key = 'summary.model_sha256'") == [(sha,)]


def test_trackers_change_nothing_in_a_run(twice_killed: keel.Run, tmp_path: Path) -> None:
    alone = keel.run(SHORT, out=tmp_path / "run")
    assert alone.summary["model_sha256"] == twice_killed.summary["model_sha256"]
    assert (alone.path / "metrics.jsonl").read_bytes() == (twice_killed.path / "metrics.jsonl").read_bytes()
    assert not (alone.path / "tracking.json").exists()


def test_trackers_are_no_part_of_the_method(twice_killed: keel.Run, tmp_path: Path) -> None:
    keel.run({**SHORT, "seed": 1}, out=tmp_path / "run")
    (method,) = compare(read_runs([twice_killed.path, tmp_path])).methods
    assert (method.label, method.seeds) == ("GHBM", [0, 1])
    assert run_module.ensure(keel.make_spec(SHORT), twice_killed.path).summary == twice_killed.summary


def test_what_is_not_finite_or_no_number_is_not_told() -> None:
    record = {"round": 3, "cohort": [1], "train_loss": None, "diverged": True, "lr": 0.1, "class_accuracy": [None, 0.5]}
    assert tracking.scalars(record) == {"lr": 0.1, "class_accuracy/1": 0.5}


@pytest.mark.parametrize("name", ALL)
def test_a_package_that_is_not_there_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(keel.KeelError, match=rf"pip install 'keel-fl\[{name}\]'"):
        keel.run({**SHORT, "tracking": {"to": [name]}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_by_the_name_of_a_tracker_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(keel.KeelError, match="pip install"):
        tracking.check_trackers(keel.make_spec({"tracking": {"to": ["wandb"]}}).tracking)


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("nobody\nanswers")

    monkeypatch.setattr(tracking.TensorBoard, "tell", fail)
    run = keel.run({**SHORT, "tracking": {"to": ["tensorboard"]}}, out=tmp_path / "run")
    assert run.status == "finished"
    assert len(run.records) == 12
    assert caplog.messages == [
        "keel: tensorboard failed (nobody answers); the run goes on without it: metrics.jsonl has all"
    ]


def test_a_tracker_that_does_not_start_is_an_error_and_the_run_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setitem(tracking.TRACKERS, "tensorboard", fail)
        with pytest.raises(keel.KeelError, match=r"'tensorboard' does not start \(nobody answers\).*keel resume"):
            keel.run({**SHORT, "tracking": {"to": ["tensorboard"]}}, out=tmp_path / "run")
    run = keel.resume(tmp_path / "run")
    assert len(events(run).Scalars("train_loss")) == 12


def test_wandb_without_a_key_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    with pytest.raises(keel.KeelError, match=r"wandb login, or tracking.wandb_mode = 'offline'"):
        keel.run({**SHORT, "tracking": {"to": ["wandb"]}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_wandb_knows_is_told_only_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    told: list[int] = []
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(
            starting_step=told[-1] + 1 if told else 0,
            log=lambda scalars, step: told.append(step),
            summary={},
            finish=lambda exit_code: None,
        )

    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(Killed):
        keel.run(
            {**SHORT, "tracking": {"to": ["wandb"], "wandb_mode": "online"}}, out=tmp_path / "run", hooks=[kill_at(5)]
        )
    keel.resume(tmp_path / "run")
    assert told == list(range(1, 13))
    assert [options["resume"] for options in asked] == ["allow", "allow"]
    assert asked[0]["id"] == asked[1]["id"]
