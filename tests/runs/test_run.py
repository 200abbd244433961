"""Run folders: what is in them, and that nothing is lost whatever happens."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import keel
from keel.algorithms import make_algorithm
from keel.runs import run as run_module
from keel.runs.folder import RunFolder, sqlite_address
from tests.conftest import small_network, stopped_by_ctrl_c, uneven_data

SHORT = {"rounds": 30, "evaluation": {"every": 5, "last": 3}}


def test_a_run_leaves_what_it_was_and_how_it_ended(tmp_path: Path) -> None:
    run = keel.run({**SHORT, "algorithm": {"name": "fedhbm"}}, out=tmp_path / "run")
    names = {p.name for p in run.path.iterdir()} - {".lock"}
    assert names == {
        "spec.toml", "environment.json", "metrics.jsonl", "timings.jsonl", "checkpoint", "summary.json", "data.json",
    }  # fmt: skip
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["rounds"] == 30
    last = [r["accuracy"] for r in run.records[-3:]]
    assert summary["accuracy"] == pytest.approx(sum(last) / 3)
    model_bytes = 4 * summary["parameters"]
    assert summary["bytes_down"] == summary["bytes_up"] == 30 * 10 * model_bytes
    assert summary["engine"] == "cohort"
    assert len(summary["model_sha256"]) == 64
    assert json.loads((run.path / "environment.json").read_text())["torch"] == torch.__version__


def test_the_trained_module_is_the_one_that_was_evaluated(tmp_path: Path) -> None:
    data = uneven_data()
    run = keel.run(SHORT, model=small_network(), data=data, out=tmp_path / "run")
    with torch.no_grad():
        right = run.module(data.test.inputs).argmax(1) == data.test.targets
    assert right.float().mean().item() == pytest.approx(run.records[-1]["accuracy"])


def test_equal_specs_give_equal_files(tmp_path: Path) -> None:
    one, two = (keel.run(SHORT, out=tmp_path / name) for name in "ab")
    for name in ("spec.toml", "metrics.jsonl"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()
    assert one.summary["model_sha256"] == two.summary["model_sha256"]


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "ghbm", "localghbm", "fedhbm"])
@pytest.mark.parametrize("checkpoint_every", [0.0, 1e9])
def test_a_killed_run_resumes_to_the_same_bits(
    algorithm: str, checkpoint_every: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "CHECKPOINT_SECONDS", checkpoint_every)
    table = {**SHORT, "algorithm": {"name": algorithm}}
    whole = keel.run(table, out=tmp_path / "whole")
    path = tmp_path / "killed"

    def kill_at(t: int) -> Any:
        def hook(record: dict[str, Any], *_: object) -> None:
            if record["round"] == t:
                raise Killed

        return hook

    with pytest.raises(Killed):
        keel.run(table, out=path, hooks=[kill_at(11)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 12, "cohort": [1')  # a line cut short
    with pytest.raises(Killed):
        keel.resume(path, hooks=[kill_at(17)])
    resumed = keel.resume(path)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert (path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_a_stopped_run_goes_on_with_the_pseudo_gradients_it_had(tmp_path: Path) -> None:
    table = {"rounds": 4, "algorithm": {"name": "fedavg"}, "evaluation": {"every": 1, "deviation": [3]}}
    keel.run(table, out=tmp_path / "whole")
    keel.run(table, out=tmp_path / "stopped", stop=lambda: True)
    keel.resume(tmp_path / "stopped", stop=lambda: True)
    keel.resume(tmp_path / "stopped")
    texts = {(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")}
    assert len(texts) == 1
    assert ["3" in json.loads(line)["deviation"] for line in texts.pop().splitlines()] == [False, False, True, True]


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = keel.run(SHORT, out=tmp_path / "run")
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    again = keel.resume(run.path)
    assert again.summary == run.summary
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_a_diverged_run_says_so_and_stays_so(tmp_path: Path) -> None:
    run = keel.run({**SHORT, "local": {"lr": 1e30}}, out=tmp_path / "run")
    assert run.status == "diverged"
    assert run.accuracy is None
    assert keel.resume(run.path).status == "diverged"


def test_a_full_disk_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(run_module, "SAVING_SHARE", 0)
    whole = keel.run(SHORT, out=tmp_path / "whole")
    fsync, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keel.run(SHORT, out=tmp_path / "full")
    monkeypatch.setattr(os, "fsync", fsync)
    assert not list((tmp_path / "full").rglob("*.new"))
    assert keel.resume(tmp_path / "full").summary["model_sha256"] == whole.summary["model_sha256"]


def test_the_engine_of_the_first_start_is_kept(tmp_path: Path) -> None:
    run = keel.run({**SHORT, "engine": {"name": "serial"}}, out=tmp_path / "run")
    assert RunFolder.open(run.path).engine == "serial"
    assert RunFolder.open(run.path).environment["layout"] == "contiguous"


def test_an_existing_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(keel.KeelError, match="exists"):
        keel.run(SHORT, out=tmp_path / "mine")


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    run = keel.run(SHORT, out=tmp_path / "run")
    with RunFolder.open(run.path).locked(), pytest.raises(keel.KeelError, match="another process"):
        keel.resume(run.path)


def test_objects_passed_in_python_have_to_be_passed_again(tmp_path: Path) -> None:
    run = keel.run(SHORT, model=small_network(), data=uneven_data(), out=tmp_path / "run")
    with pytest.raises(keel.KeelError, match="model="):
        keel.resume(run.path)
    assert keel.resume(run.path, model=small_network(), data=uneven_data()).status == "finished"


def test_what_is_passed_again_has_to_be_the_same(tmp_path: Path) -> None:
    run = keel.run(SHORT, model=small_network(), data=uneven_data(), out=tmp_path / "run")
    with pytest.raises(keel.KeelError, match="initial_sha256"):
        keel.resume(run.path, model=small_network(seed=5), data=uneven_data())
    with pytest.raises(keel.KeelError, match="examples_sha256"):
        keel.resume(run.path, model=small_network(), data=uneven_data(seed=5))


def test_a_loss_of_the_users_own_has_to_be_passed_again(tmp_path: Path) -> None:
    def halved(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none") / 2

    run = keel.run(SHORT, loss=halved, out=tmp_path / "run")
    with pytest.raises(keel.KeelError, match="loss="):
        keel.resume(run.path)
    assert keel.resume(run.path, loss=halved).summary == run.summary


def test_an_algorithm_object_keeps_its_own_settings_over_a_resume(tmp_path: Path) -> None:
    ghbm = make_algorithm("ghbm")  # tau = 1/C, whatever the defaults of the data set
    whole = keel.run(SHORT, algorithm=ghbm, out=tmp_path / "whole")
    assert 'tau = "period"' in (whole.path / "spec.toml").read_text()

    def kill(record: dict[str, Any], *_: object) -> None:
        if record["round"] == 9:
            raise Killed

    with pytest.raises(Killed):
        keel.run(SHORT, algorithm=ghbm, out=tmp_path / "killed", hooks=[kill])
    assert keel.resume(tmp_path / "killed").summary["model_sha256"] == whole.summary["model_sha256"]


def test_an_algorithm_that_cannot_be_found_by_name_has_to_be_passed_again(tmp_path: Path) -> None:
    @keel.hyperparameters
    class Local(keel.Algorithm):
        name, title, paper = "local", "Local", "none"

    run = keel.run(SHORT, algorithm=Local(), out=tmp_path / "run")
    with pytest.raises(keel.KeelError, match="algorithm="):
        keel.resume(run.path)
    assert keel.resume(run.path, algorithm=Local()).summary == run.summary


def test_a_run_that_diverged_and_was_killed_at_once_does_not_go_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "CHECKPOINT_SECONDS", 0.0)
    table = {**SHORT, "local": {"lr": 1e30}}
    whole = keel.run(table, out=tmp_path / "whole")

    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(run_module, "summarize", kill)
    with pytest.raises(Killed):
        keel.run(table, out=tmp_path / "killed")
    monkeypatch.undo()
    assert keel.resume(tmp_path / "killed").summary["model_sha256"] == whole.summary["model_sha256"]
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_runs_of_another_version_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = keel.make_spec(SHORT)
    run_module.ensure(spec, tmp_path / "run")
    run_module.ensure(spec, tmp_path / "run")
    monkeypatch.setattr(run_module, "environment", lambda: {"keel": "another"})
    with pytest.raises(keel.KeelError, match="made by another version"):
        run_module.ensure(spec, tmp_path / "run")


def test_names_below_runs_are_never_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [keel.run({**SHORT, "rounds": 1}).path.name for _ in range(3)]
    assert paths == ["digits-mlp-ghbm-seed0", "digits-mlp-ghbm-seed0-2", "digits-mlp-ghbm-seed0-3"]


def test_a_damaged_folder_is_named_in_one_line(tmp_path: Path) -> None:
    run = keel.run({**SHORT, "rounds": 3}, out=tmp_path / "run")
    (run.path / "metrics.jsonl").write_text("{]\n")
    with pytest.raises(keel.KeelError, match=r"metrics.jsonl' is damaged"):
        _ = run.records
    (run.path / "checkpoint/state.safetensors").write_bytes(b"")
    with pytest.raises(keel.KeelError, match=r"state.safetensors' is damaged"):
        keel.resume(run.path)


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        ({"model": torch.nn.Linear}, "model: .* accepted: an instance of Module"),
        ({"data": (1, 2)}, "accepted: an instance of FederatedData"),
        ({"algorithm": "fedavg"}, "accepted: an instance of Algorithm"),
        ({"loss": "mse"}, "loss: 'mse'"),
        ({"loss": lambda outputs, targets: 3}, "loss: gives 3 for 2 examples"),
    ],
    ids=["model", "data", "algorithm", "loss", "number"],
)
def test_what_is_passed_has_to_be_of_its_kind(passed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match=words):
        keel.run(SHORT, out=tmp_path / "run", **passed)
    assert not (tmp_path / "run").exists()


def test_an_algorithm_that_loses_the_model_is_told_so(tmp_path: Path) -> None:
    @keel.hyperparameters
    class Lost(keel.Algorithm):
        name, title, paper = "lost", "Lost", "none"

        def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
            return {"thet": server["theta"]}

    with pytest.raises(keel.KeelError, match=r"Lost.aggregate has to return a state whose theta is a model of 4810"):
        keel.run(SHORT, algorithm=Lost(), out=tmp_path / "run")


def test_runs_work_outside_the_main_thread(tmp_path: Path) -> None:
    worker = threading.Thread(target=keel.run, args=(SHORT,), kwargs={"out": tmp_path / "run"})
    worker.start()
    worker.join()
    assert RunFolder.open(tmp_path / "run").ended


KEEL = [sys.executable, "-m", "keel"]
ONE_RUN = [*KEEL, "run", "--rounds", "100", "--engine", "serial", "--quiet", "--set", "evaluation.last=5"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metrics of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    subprocess.run([*ONE_RUN, "--out", str(folder)], check=True, capture_output=True)
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_from_outside_costs_no_work(how: signal.Signals, tmp_path: Path, uninterrupted: bytes) -> None:
    started = subprocess.Popen([*ONE_RUN, "--out", "run"], cwd=tmp_path, stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (metrics.exists() and metrics.read_text().count("\n") > 20):
        time.sleep(0.02)
    started.send_signal(how)
    _, messages = started.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert not (tmp_path / "run" / "summary.json").exists()
    else:
        assert started.returncode == 130
        assert b"keel resume run" in messages
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    subprocess.run([*KEEL, "resume", "run", "--quiet"], cwd=tmp_path, check=True, capture_output=True)
    assert metrics.read_bytes() == uninterrupted


def test_ctrl_c_stops_many_runs_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [*KEEL, "demo", "--out", "demo", "--rounds", "250", "--seeds", "1", "--json"]
    stopped_by_ctrl_c(command, tmp_path, "demo/*/metrics.jsonl", 20)
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert [row["status"] for row in json.loads(done.stdout)] == ["finished"] * 4


def test_a_checkpoint_is_a_safetensors_file(tmp_path: Path) -> None:
    ended = keel.run({"algorithm": {"name": "ghbm"}, "rounds": 5}, out=tmp_path / "run")
    found = load_file(tmp_path / "run/checkpoint/state.safetensors")
    weights = torch.cat([p.detach().reshape(-1) for p in ended.module.parameters()])
    assert torch.equal(found["server/theta"], weights)
    assert found["memory/clients"].dtype == torch.int64


@pytest.mark.parametrize("name", ["plain", "with space", "a#b", "a%20b", "a?b"])
def test_a_database_is_where_its_address_says(tmp_path: Path, name: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy comes with the extras that have databases")
    (tmp_path / name).mkdir()
    engine = sqlalchemy.create_engine(sqlite_address(tmp_path / name / "x.db"))
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table t (i integer)"))
    engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "x.db").stat().st_size
