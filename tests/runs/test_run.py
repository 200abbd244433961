"""Runs in their folders: what a run writes, and that a stop, a kill or a full disk loses nothing."""

import errno
import json
import os
import signal
import threading
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import keel
from keel.algorithms import make_algorithm
from keel.runs import execute, parallel
from keel.runs import run as run_module
from keel.runs.files import sqlite_address
from keel.runs.folder import RunFolder
from keel.runs.run import find_run
from tests.conftest import (
    Called,
    Command,
    Killed,
    kill_at,
    one_line_error,
    small_network,
    stopped_by_ctrl_c,
    uneven_data,
)

SHORT = {"rounds": 12, "evaluation": {"every": 5, "last": 3}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> keel.Run:
    """A finished run of FedHBM; tests that change its folder copy it first."""
    return keel.run({**SHORT, "algorithm": {"name": "fedhbm"}}, out=tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copied(finished: keel.Run, tmp_path: Path) -> Path:
    """A copy of the finished run's folder."""
    return Path(copytree(finished.path, tmp_path / "copied"))


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> keel.Run:
    """A finished run whose model and data were passed in Python."""
    out = tmp_path_factory.mktemp("custom") / "run"
    return keel.run(SHORT, model=small_network(), data=uneven_data(), out=out)


def test_a_finished_run_has_its_spec_records_environment_and_summary(finished: keel.Run) -> None:
    names = {p.name for p in finished.path.iterdir()} - {".lock"}
    assert names == {
        "spec.toml", "environment.json", "metrics.jsonl", "timings.jsonl", "checkpoint", "summary.json", "data.json",
        "model.json", "manifest.json",
    }  # fmt: skip
    summary = json.loads((finished.path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["rounds"] == 12
    last = [r["accuracy"] for r in finished.records[-3:]]
    assert summary["accuracy"] == pytest.approx(sum(last) / 3)
    model_bytes = 4 * summary["parameters"]
    assert summary["bytes_down"] == summary["bytes_up"] == 12 * 10 * model_bytes
    assert summary["engine"] == "cohort"
    assert len(summary["model_sha256"]) == 64
    assert json.loads((finished.path / "environment.json").read_text())["torch"] == torch.__version__


def test_the_returned_module_is_the_evaluated_model(custom: keel.Run) -> None:
    test = uneven_data().test
    with torch.no_grad():
        correct = custom.module(test.inputs).argmax(1) == test.targets
    assert correct.float().mean().item() == pytest.approx(custom.records[-1]["accuracy"])


def test_equal_specs_give_equal_files(finished: keel.Run, tmp_path: Path) -> None:
    again = keel.run({**SHORT, "algorithm": {"name": "fedhbm"}}, out=tmp_path / "run")
    for name in ("spec.toml", "metrics.jsonl"):
        assert (again.path / name).read_bytes() == (finished.path / name).read_bytes()
    assert again.summary["model_sha256"] == finished.summary["model_sha256"]


def test_a_key_that_a_hook_adds_to_a_record_is_written(tmp_path: Path) -> None:
    def add(record: dict[str, Any], *_: object) -> None:
        record["weather"] = "sunny"

    class CohortSize(keel.Observer):
        def round_ended(self, event: Any) -> dict[str, Any]:
            return {"cohort_size": len(event.work.cohort)}

    run = keel.run({**SHORT, "rounds": 2}, hooks=[add, CohortSize()], out=tmp_path / "run")
    assert [(record["weather"], record["cohort_size"]) for record in run.records] == [("sunny", 10)] * 2  # type: ignore[typeddict-item]
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [{**record, "crc32": line["crc32"]} for record, line in zip(run.records, lines, strict=True)] == lines


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "ghbm", "localghbm", "fedhbm"])
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9], ids=["checkpoints", "no checkpoint"])
def test_a_killed_run_resumes_to_the_same_bits(
    algorithm: str, checkpoint_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "CHECKPOINT_SECONDS", checkpoint_seconds)
    table = {**SHORT, "algorithm": {"name": algorithm}}
    whole = keel.run(table, out=tmp_path / "whole")
    path = tmp_path / "killed"
    with pytest.raises(Killed):
        keel.run(table, out=path, hooks=[kill_at(5)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "cohort": [1')  # an incomplete line
    with pytest.raises(Killed):
        keel.resume(path, hooks=[kill_at(9)])
    resumed = keel.resume(path)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert (path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


@keel.hyperparameters
class Nested(keel.Algorithm):
    """FedAvgM whose momentum has a name with slashes, as a user's naming scheme may have."""

    name, title, paper = "nested", "Nested", "none"

    def init_server(self, theta: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"theta": theta, "momentum/layers/0": torch.zeros_like(theta)}

    def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
        delta = keel.weighted_mean(reports)["delta"]
        momentum = 0.9 * server["momentum/layers/0"] + delta
        return {"theta": server["theta"] - momentum, "momentum/layers/0": momentum}


def test_server_state_whose_name_contains_a_slash_survives_a_resume(tmp_path: Path) -> None:
    whole = keel.run(SHORT, algorithm=Nested(), out=tmp_path / "whole")
    stopped = keel.run(SHORT, algorithm=Nested(), out=tmp_path / "stopped", stop=lambda: True)
    state = RunFolder.open(stopped.path).checkpoint()
    assert state is not None
    assert set(state.server) == {"theta", "momentum/layers/0"}
    assert keel.resume(stopped.path).summary["model_sha256"] == whole.summary["model_sha256"]


def test_a_resumed_run_keeps_the_pseudo_gradients_of_the_deviation(tmp_path: Path) -> None:
    table = {"rounds": 4, "algorithm": {"name": "fedavg"}, "evaluation": {"every": 1, "deviation": [3]}}
    keel.run(table, out=tmp_path / "whole")
    keel.run(table, out=tmp_path / "stopped", stop=lambda: True)
    keel.resume(tmp_path / "stopped", stop=lambda: True)
    keel.resume(tmp_path / "stopped")
    texts = {(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")}
    assert len(texts) == 1
    assert ["3" in json.loads(line)["deviation"] for line in texts.pop().splitlines()] == [False, False, True, True]


def test_resuming_a_finished_run_changes_nothing(finished: keel.Run) -> None:
    before = {p: p.read_bytes() for p in finished.path.rglob("*") if p.is_file()}
    again = keel.resume(finished.path)
    assert again.summary == finished.summary
    assert {p: p.read_bytes() for p in finished.path.rglob("*") if p.is_file()} == before


def test_a_diverged_run_stays_diverged(tmp_path: Path) -> None:
    run = keel.run({**SHORT, "local": {"lr": 1e30}}, out=tmp_path / "run")
    assert run.status == "diverged"
    assert run.accuracy is None
    assert keel.resume(run.path).status == "diverged"


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(execute, "SAVING_SHARE", 0)
    whole = keel.run(SHORT, out=tmp_path / "whole")
    fsync, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*keel resume"):
        keel.run(SHORT, out=tmp_path / "full")
    monkeypatch.setattr(os, "fsync", fsync)
    assert not list((tmp_path / "full").rglob("*.new"))
    assert RunFolder.open(tmp_path / "full").checkpoint() is not None
    assert keel.resume(tmp_path / "full").summary["model_sha256"] == whole.summary["model_sha256"]


def test_the_engine_and_the_layout_of_the_first_start_are_recorded(tmp_path: Path) -> None:
    run = keel.run({**SHORT, "rounds": 1, "engine": {"name": "serial"}}, out=tmp_path / "run")
    assert RunFolder.open(run.path).engine == "serial"
    assert RunFolder.open(run.path).environment["layout"] == "contiguous"


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(keel.KeelError, match=r"mine' exists; use a new folder"):
        keel.run(SHORT, out=tmp_path / "mine")


def test_two_processes_cannot_write_one_run(finished: keel.Run) -> None:
    with RunFolder.open(finished.path).locked(), pytest.raises(keel.KeelError, match="another process"):
        keel.resume(finished.path)


def test_a_model_and_data_passed_in_python_must_be_passed_to_resume(custom: keel.Run) -> None:
    call = rf"keel\.resume\('{custom.path}', model=\.\.\., data=\.\.\.\)"
    with pytest.raises(keel.KeelError, match=rf"started in Python: pass model and data again, with {call}"):
        keel.resume(custom.path)
    with pytest.raises(keel.KeelError, match=rf"pass data again, with {call}"):
        keel.resume(custom.path, model=small_network())
    assert keel.resume(custom.path, model=small_network(), data=uneven_data()).status == "finished"


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"model": small_network(seed=5)}, "model differs .*: Sequential with 39 parameters as then, but other"),
        ({"model": torch.nn.Linear(5, 3)}, "model .*: Sequential with 39 parameters then, Linear with 18"),
        ({"data": uneven_data(seed=5)}, "data differ .*: 50 examples in 6 clients as then, but other inputs"),
        ({"data": uneven_data(sizes=(3, 11, 7))}, "data .*: 50 examples in 6 clients then, 21 examples in 3"),
        ({"data": uneven_data(sizes=(3, 11, 7, 4, 9, 16))}, "data differ .*: 50 examples in 6 clients as then"),
        ({"loss": lambda outputs, targets: outputs.square().mean(1)}, "loss .*: cross entropy then, a loss passed in"),
    ],
)  # fmt: skip
def test_resume_says_in_words_which_object_differs(custom: keel.Run, objects: dict[str, Any], message: str) -> None:
    with pytest.raises(keel.KeelError, match=message) as caught:
        keel.resume(custom.path, **{"model": small_network(), "data": uneven_data(), **objects})
    assert "sha256" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_ended_run_without_its_checkpoint_returns_no_untrained_model(copied: Path) -> None:
    (copied / "checkpoint/state.safetensors").unlink()
    with pytest.raises(keel.KeelError, match=r"state.safetensors' is damaged \(it is missing\); keel repair"):
        keel.resume(copied)


def test_a_loss_passed_in_python_must_be_passed_to_resume(tmp_path: Path) -> None:
    def halved(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none") / 2

    run = keel.run({**SHORT, "rounds": 1, "engine": {"name": "serial"}}, loss=halved, out=tmp_path / "run")
    with pytest.raises(keel.KeelError, match="loss="):
        keel.resume(run.path)
    assert keel.resume(run.path, loss=halved).summary == run.summary


def test_a_built_in_algorithm_object_keeps_its_settings_at_resume(tmp_path: Path) -> None:
    ghbm = make_algorithm("ghbm")  # tau = 1/C, not the default of the data set
    whole = keel.run(SHORT, algorithm=ghbm, out=tmp_path / "whole")
    assert 'tau = "period"' in (whole.path / "spec.toml").read_text()
    with pytest.raises(Killed):
        keel.run(SHORT, algorithm=ghbm, out=tmp_path / "killed", hooks=[kill_at(9)])
    assert keel.resume(tmp_path / "killed").summary["model_sha256"] == whole.summary["model_sha256"]


def test_an_algorithm_that_cannot_be_imported_must_be_passed_to_resume(tmp_path: Path) -> None:
    @keel.hyperparameters
    class Local(keel.Algorithm):
        name, title, paper = "local", "Local", "none"

    run = keel.run({**SHORT, "rounds": 1}, algorithm=Local(), out=tmp_path / "run")
    with pytest.raises(keel.KeelError, match="algorithm="):
        keel.resume(run.path)
    assert keel.resume(run.path, algorithm=Local()).summary == run.summary


def test_a_run_killed_when_it_diverged_resumes_from_a_finite_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "CHECKPOINT_SECONDS", 0.0)
    table = {**SHORT, "local": {"lr": 1e30}}
    whole = keel.run(table, out=tmp_path / "whole")

    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(execute, "summarize", kill)
    with pytest.raises(Killed):
        keel.run(table, out=tmp_path / "killed")
    monkeypatch.undo()
    assert keel.resume(tmp_path / "killed").summary["model_sha256"] == whole.summary["model_sha256"]
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_runs_of_another_version_are_not_reused(finished: keel.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = keel.make_spec({**SHORT, "algorithm": {"name": "fedhbm"}})
    folder = find_run(spec, finished.path)
    assert folder is not None
    assert folder.ended
    monkeypatch.setattr(run_module, "versions", lambda: {**folder.environment, "torch": "another"})
    with pytest.raises(keel.KeelError, match=r"made by another version \(torch\)"):
        find_run(spec, finished.path)


def test_a_run_of_another_spec_is_not_reused(finished: keel.Run) -> None:
    with pytest.raises(keel.KeelError, match="holds a run of another spec"):
        find_run(keel.make_spec(SHORT), finished.path)


def test_an_ended_run_is_not_rebuilt(finished: keel.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison whose runs exist loads no data and makes no engine."""
    for module in ("keel.runs.run", "keel.runs.build"):
        monkeypatch.setattr(f"{module}.make_task", lambda *_, **__: pytest.fail("builds the task again"))
    spec = keel.make_spec({**SHORT, "algorithm": {"name": "fedhbm"}})
    assert parallel.run_one(0, parallel.Job(spec, finished.path), workers=1) == finished.summary


def test_names_below_runs_are_never_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [keel.run({**SHORT, "rounds": 1}).path.name for _ in range(3)]
    assert paths == ["digits-mlp-ghbm-seed0", "digits-mlp-ghbm-seed0-2", "digits-mlp-ghbm-seed0-3"]


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        ({"model": torch.nn.Linear}, r"model must be an instance of Module \(got type\)"),
        ({"data": (1, 2)}, r"data must be an instance of FederatedData \(got tuple\)"),
        ({"algorithm": "fedavg"}, r"algorithm must be an instance of Algorithm \(got str\)"),
        ({"loss": 3}, r"loss must be a name or a function .*got 3"),
        ({"loss": lambda outputs, targets: 3}, r"loss must return one loss per example.*got 3 for 2 examples"),
    ],
    ids=["model", "data", "algorithm", "loss", "number"],
)
def test_an_argument_of_the_wrong_type_is_refused(passed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match=message):
        keel.run(SHORT, out=tmp_path / "run", **passed)
    assert not (tmp_path / "run").exists()


def test_an_algorithm_that_returns_no_model_is_refused(tmp_path: Path) -> None:
    @keel.hyperparameters
    class Lost(keel.Algorithm):
        name, title, paper = "lost", "Lost", "none"

        def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
            return {"thet": server["theta"]}

    with pytest.raises(keel.KeelError, match=r"Lost.aggregate must return a server state whose 'theta' has 4810"):
        keel.run(SHORT, algorithm=Lost(), out=tmp_path / "run")


def test_a_run_works_outside_the_main_thread(tmp_path: Path) -> None:
    worker = threading.Thread(target=keel.run, args=({**SHORT, "rounds": 1},), kwargs={"out": tmp_path / "run"})
    worker.start()
    worker.join()
    assert RunFolder.open(tmp_path / "run").ended


def test_of_two_processes_that_make_one_folder_the_second_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), "out")  # which a rename onto a folder raises
    monkeypatch.setattr(RunFolder, "create", Mock(side_effect=taken))
    with one_line_error("exists; use a new folder"):
        keel.run({"rounds": 1}, out=tmp_path / "out")


SERIAL = {"rounds": 40, "engine": {"name": "serial"}, "evaluation": {"last": 5}}
COMMAND = ["run", "--rounds", "40", "--engine", "serial", "--quiet", "--set", "evaluation.last=5", "--out", "run"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metrics of a run that is not stopped."""
    run = keel.run(SERIAL, out=tmp_path_factory.mktemp("uninterrupted") / "run")
    return (run.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_from_another_process_loses_no_work(
    number: signal.Signals, tmp_path: Path, uninterrupted: bytes
) -> None:
    command = Command(tmp_path, COMMAND)
    command.wait_for_records(tmp_path, "run/metrics.jsonl", 5)
    ended = command.stop(number)
    if number == signal.SIGKILL:
        assert not (tmp_path / "run" / "summary.json").exists()
    else:
        assert ended.code == 128 + number
        assert "keel resume run" in ended.err
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert keel.resume(tmp_path / "run").status == "finished"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == uninterrupted


def test_ctrl_c_stops_several_runs_and_the_same_command_continues(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments = ["demo", "--out", "demo", "--rounds", "60", "--seeds", "1", "--json"]
    stopped_by_ctrl_c(arguments, tmp_path, "demo/*/metrics.jsonl", 5)
    request.getfixturevalue("in_process")
    again: Called = request.getfixturevalue("keel")(*arguments)
    assert again.code == 0, again.err
    assert [row["status"] for row in json.loads(again.out)] == ["finished"] * 5


def test_a_checkpoint_is_a_safetensors_file(finished: keel.Run) -> None:
    tensors = load_file(finished.path / "checkpoint/state.safetensors")
    weights = torch.cat([p.detach().reshape(-1) for p in finished.module.parameters()])
    assert torch.equal(tensors["server/theta"], weights)
    assert tensors["clients/clients"].dtype == torch.int64


@pytest.mark.parametrize("name", ["plain", "with space", "a#b", "a%20b", "a?b"])
def test_a_database_address_leads_to_its_file(tmp_path: Path, name: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy comes with the extras that use databases")
    (tmp_path / name).mkdir()
    engine = sqlalchemy.create_engine(sqlite_address(tmp_path / name / "x.db"))
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table t (i integer)"))
    engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "x.db").stat().st_size
