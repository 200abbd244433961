"""Trackers: each has every number of metrics.jsonl exactly once, whatever happened during the run."""

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
from keel.report.comparison import compare
from keel.runs import execute, tracking
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder
from keel.runs.run import find_run

ALL = ["tensorboard", "wandb", "mlflow"]
SHORT = {"rounds": 12, "evaluation": {"every": 5, "last": 2}}
Logged = list[tuple[str, int, float]]
"""Names, rounds and values."""


class Killed(BaseException):
    """Simulates a kill."""


def kill_at(t: int) -> Any:
    def hook(record: dict[str, Any], *_: object) -> None:
        if record["round"] == t:
            raise Killed

    return hook


@pytest.fixture(scope="module")
def twice_killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[keel.Run]:
    """A run with every tracker, killed before its first checkpoint and again after one, then resumed to its end."""
    path = tmp_path_factory.mktemp("runs") / "run"
    table = {**SHORT, "tracking": {"to": ALL, "project": "boats", "wandb_mode": "offline"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with pytest.raises(Killed):
            keel.run(table, out=path, hooks=[kill_at(4)])
        patch.setattr(execute, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(execute, "SAVING_SHARE", 0)
        with pytest.raises(Killed):
            keel.resume(path, hooks=[kill_at(8)])
        yield keel.resume(path)


def expected(run: keel.Run) -> Logged:
    names = ("lr", "bytes_down", "bytes_up", "train_loss", "test_loss", "accuracy")
    logged = [(name, r["round"], r[name]) for r in run.records for name in names if name in r]
    for record in run.records:
        for label, accuracy in enumerate(record.get("class_accuracy", [])):
            logged.append((f"class_accuracy/{label}", record["round"], accuracy))
    return sorted(logged)


def tensorboard_events(run: keel.Run) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def wandb_records(run: keel.Run) -> list[Any]:
    """The records of wandb's offline run: protocol buffers in a LevelDB log after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    content, offset, record, records = file.read_bytes(), 7, b"", []
    while offset < len(content):
        if 32768 - offset % 32768 < 7:  # the rest of a block is too short for the header of a chunk
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[offset : offset + 7])
        record += content[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a complete record, or the last chunk of one
            records.append(Record.FromString(record))
            record = b""
    return records


def mlflow_rows(run: keel.Run, query: str) -> list[Any]:
    with sqlite3.connect(run.path.parent / "mlflow.db") as store:
        rows = store.execute(query).fetchall()
    store.close()
    return rows


def test_tensorboard_has_every_number_once(twice_killed: keel.Run) -> None:
    read = tensorboard_events(twice_killed)
    logged = sorted((name, e.step, e.value) for name in read.Tags()["scalars"] for e in read.Scalars(name))
    assert [row[:2] for row in logged] == [row[:2] for row in expected(twice_killed)]
    assert [row[2] for row in logged] == pytest.approx([row[2] for row in expected(twice_killed)], rel=1e-6)  # float32


def test_wandb_has_every_number_once(twice_killed: keel.Run) -> None:
    logged = []
    for record in wandb_records(twice_killed):
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        logged += [(name, items["_step"], value) for name, value in items.items() if not name.startswith("_")]
    assert sorted(logged) == expected(twice_killed)


def test_mlflow_has_every_number_once(twice_killed: keel.Run) -> None:
    logged = mlflow_rows(twice_killed, "SELECT key, step, value FROM metrics WHERE key NOT LIKE 'summary.%'")
    assert sorted(logged) == expected(twice_killed)


def test_each_tracker_has_the_spec_and_the_summary(twice_killed: keel.Run) -> None:
    accuracy, sha = twice_killed.accuracy, twice_killed.summary["model_sha256"]

    (summary,) = tensorboard_events(twice_killed).Tensors("summary/text_summary")
    (spec,) = tensorboard_events(twice_killed).Tensors("spec/text_summary")
    assert f"accuracy = {accuracy}" in summary.tensor_proto.string_val[0].decode()
    assert 'name = "ghbm"' in spec.tensor_proto.string_val[0].decode()

    records = wandb_records(twice_killed)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.run_id, run.project) == (RunFolder(twice_killed.path).tracker_ids["wandb"], "boats")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["algorithm"]["name"] == "ghbm"
    summaries = {i.key or i.nested_key[0]: i.value_json for record in records for i in record.summary.update}
    assert json.loads(summaries["summary.accuracy"]) == accuracy

    assert mlflow_rows(twice_killed, "SELECT name FROM experiments WHERE name != 'Default'") == [("boats",)]
    assert mlflow_rows(twice_killed, "SELECT name, status FROM runs") == [("run", "FINISHED")]
    assert ("algorithm.name", "ghbm") in mlflow_rows(twice_killed, "SELECT key, value FROM params")
    assert mlflow_rows(twice_killed, "SELECT value FROM metrics WHERE key = 'summary.accuracy'") == [(accuracy,)]
    assert mlflow_rows(twice_killed, "SELECT value FROM tags WHERE key = 'summary.model_sha256'") == [(sha,)]


def test_trackers_do_not_change_the_run(twice_killed: keel.Run, tmp_path: Path) -> None:
    untracked = keel.run(SHORT, out=tmp_path / "run")
    assert untracked.summary["model_sha256"] == twice_killed.summary["model_sha256"]
    assert (untracked.path / "metrics.jsonl").read_bytes() == (twice_killed.path / "metrics.jsonl").read_bytes()
    assert not (untracked.path / "tracking.json").exists()


def test_a_tracked_run_is_the_same_method(twice_killed: keel.Run, tmp_path: Path) -> None:
    keel.run({**SHORT, "seed": 1}, out=tmp_path / "run")
    (method,) = compare(find_runs([twice_killed.path, tmp_path])).methods
    assert (method.label, method.seeds) == ("GHBM", [0, 1])
    folder = find_run(keel.make_spec(SHORT), twice_killed.path)
    assert folder is not None
    assert folder.summary == twice_killed.summary


def test_only_finite_numbers_are_logged() -> None:
    record = {"round": 3, "cohort": [1], "train_loss": None, "diverged": True, "lr": 0.1, "class_accuracy": [None, 0.5]}
    clients = {"clients": {"mean": 0.5, "std": None}}
    assert tracking.scalars({**record, **clients}) == {"lr": 0.1, "class_accuracy/1": 0.5, "clients/mean": 0.5}


@pytest.mark.parametrize("name", ALL)
def test_a_missing_package_is_reported_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(keel.KeelError, match=rf"pip install 'keel-fl\[{name}\]'"):
        keel.run({**SHORT, "tracking": {"to": [name]}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_named_like_a_tracker_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(keel.KeelError, match="pip install"):
        tracking.check_trackers(keel.make_spec({"tracking": {"to": ["wandb"]}}).tracking)


def test_a_tracker_that_fails_gives_one_warning_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("nobody\nanswers")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    run = keel.run({**SHORT, "tracking": {"to": ["tensorboard"]}}, out=tmp_path / "run")
    assert run.status == "finished"
    assert len(run.records) == 12
    (message,) = caplog.messages
    assert message.startswith("keel: tensorboard failed (nobody answers)")
    assert "metrics.jsonl" in message


def test_a_run_whose_tracker_does_not_start_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setitem(tracking.TRACKERS, "tensorboard", fail)
        with pytest.raises(keel.KeelError, match=r"'tensorboard' does not start \(nobody answers\).*keel resume"):
            keel.run({**SHORT, "tracking": {"to": ["tensorboard"]}}, out=tmp_path / "run")
    run = keel.resume(tmp_path / "run")
    assert len(tensorboard_events(run).Scalars("train_loss")) == 12


def test_wandb_without_a_key_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    with pytest.raises(keel.KeelError, match=r"wandb login, or tracking.wandb_mode = 'offline'"):
        keel.run({**SHORT, "tracking": {"to": ["wandb"]}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_sends_wandb_only_new_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    steps: list[int] = []
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(
            starting_step=steps[-1] + 1 if steps else 0,
            log=lambda scalars, step: steps.append(step),
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
    assert steps == list(range(1, 13))
    assert [options["resume"] for options in calls] == ["allow", "allow"]
    assert calls[0]["id"] == calls[1]["id"]
