"""A run folder whose files do not have the content that was written."""

import errno
import json
import logging
import os
import tracemalloc
from pathlib import Path
from shutil import copyfile, copytree, rmtree
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import keel
from keel.core.client_state import ClientStates
from keel.errors import DamagedFile, KeelError
from keel.runs.files import make_folders
from keel.runs.folder import RunFolder
from keel.runs.repair import repair
from keel.runs.verify import damages
from tests.cli.calling import call_keel
from tests.conftest import Called, as_earlier_version

TABLE = {
    "algorithm": {"name": "fedhbm"},
    "model": {"name": "linear"},
    "rounds": 8,
    "evaluation": {"every": 4, "last": 2},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> keel.Run:
    return keel.run(TABLE, out=tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of rounds 3 and 6."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    for start in (lambda stop: keel.run(TABLE, out=path, stop=stop), lambda stop: keel.resume(path, stop=stop)):
        rounds = iter(range(1, 9))
        start(lambda rounds=rounds: next(rounds) == 3)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ended run that differs in its seed."""
    path = tmp_path_factory.mktemp("other") / "run"
    keel.run({**TABLE, "seed": 1}, out=path)
    return path


@pytest.fixture
def copied(stopped: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(copytree(stopped, tmp_path / "run"))


@pytest.fixture
def ended(finished: keel.Run, tmp_path: Path) -> RunFolder:
    return RunFolder(copytree(finished.path, tmp_path / "ended"))


def flip(file: Path, position: float = 0.9) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * position)] ^= 1
    file.write_bytes(content)


def equal(run: keel.Run, other: keel.Run) -> bool:
    same_model = run.summary["model_sha256"] == other.summary["model_sha256"]
    return same_model and (run.path / "metrics.jsonl").read_bytes() == (other.path / "metrics.jsonl").read_bytes()


def test_an_intact_folder_has_no_damage(copied: RunFolder, ended: RunFolder) -> None:
    assert damages(copied) == damages(ended) == []
    assert repair(copied) == repair(ended) == []


def test_a_flipped_bit_in_any_file_is_found(ended: RunFolder) -> None:
    for file in (file for file in ended.path.rglob("*") if file.is_file() and file.stat().st_size):
        intact = file.read_bytes()
        flip(file, 0.3)
        assert any(file.name in str(damage) for damage in damages(ended)), file
        file.write_bytes(intact)
    assert damages(ended) == []


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    copied: RunFolder, finished: keel.Run, caplog: pytest.LogCaptureFixture
) -> None:
    flip(copied.checkpoint_file)
    rounds: list[int] = []
    with caplog.at_level(logging.WARNING):
        run = keel.resume(copied.path, hooks=[lambda record, *_: rounds.append(record["round"])])
    assert rounds[0] == 4
    assert "state.safetensors' is damaged" in caplog.text
    assert "continues from the checkpoint before it, of round 3" in caplog.text
    assert equal(run, finished)


def test_a_damaged_client_state_is_never_used(copied: RunFolder) -> None:
    flip(copied.clients_file, 0.01)
    states = ClientStates(copied.clients_file)
    copied.checkpoint(states)
    with pytest.raises(DamagedFile, match=r"clients.bin' is damaged \(the checksum of client \d+ is wrong\)"):
        dict(states)


def test_a_damaged_older_checkpoint_does_not_stop_a_run(copied: RunFolder, finished: keel.Run) -> None:
    flip(copied.previous_file)
    assert equal(keel.resume(copied.path), finished)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoint/state.safetensors"])
def test_a_file_of_another_run_is_damage(name: str, ended: RunFolder, other: Path, finished: keel.Run) -> None:
    copyfile(other / name, ended.path / name)
    assert damages(ended)
    with pytest.raises(DamagedFile):
        keel.resume(ended.path)
    assert repair(ended)
    assert keel.resume(ended.path).summary["model_sha256"] == finished.summary["model_sha256"]
    assert damages(ended) == []


def test_a_run_does_not_continue_from_a_checkpoint_of_another_run(copied: RunFolder, other: Path) -> None:
    for file in (copied.checkpoint_file, copied.previous_file):
        copyfile(other / "checkpoint" / "state.safetensors", file)
    copyfile(other / "checkpoint" / "clients.bin", copied.clients_file)
    with copied.metrics.open("ab") as stream:  # it may have continued after its last checkpoint
        stream.write(b"".join((other / "metrics.jsonl").read_bytes().splitlines(keepends=True)[6:7]))
    with pytest.raises(DamagedFile):
        keel.resume(copied.path)


def test_bytes_after_the_last_line_of_an_ended_run_are_damage(ended: RunFolder, finished: keel.Run) -> None:
    for file in (ended.metrics, ended.timings):
        with file.open("ab") as stream:
            stream.write(b"x")
    assert [str(error).partition(";")[0].partition("(")[2] for error in damages(ended)] == [
        "it has bytes after its last line)",
        "it has bytes after its last line)",
    ]
    assert repair(ended)
    assert keel.resume(ended.path).summary["model_sha256"] == finished.summary["model_sha256"]
    assert damages(ended) == []


def test_a_folder_in_place_of_a_checkpoint_is_damage(copied: RunFolder) -> None:
    copied.checkpoint_file.unlink()
    copied.checkpoint_file.mkdir()
    assert "state.safetensors' is damaged" in str(damages(copied)[0])


def test_another_sealed_file_in_place_of_the_manifest_is_damage(ended: RunFolder) -> None:
    copyfile(ended.summary_file, ended.path / "manifest.json")
    assert "manifest.json' is damaged (files is missing)" in str(damages(ended)[0])


def test_a_lost_line_is_damage(copied: RunFolder) -> None:
    lines = copied.metrics.read_bytes().splitlines(keepends=True)
    copied.metrics.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(DamagedFile, match="line 3 is about round 4"):
        keel.resume(copied.path)
    copied.metrics.write_bytes(b"".join(lines[:4]))
    with pytest.raises(DamagedFile, match="it has 4 lines, but the run 6 rounds"):
        keel.resume(copied.path)
    copied.summary_file.unlink()  # as after a kill
    with pytest.raises(DamagedFile, match="it has 4 lines, but the checkpoint 6 rounds"):
        keel.resume(copied.path)


def test_repair_returns_to_the_checkpoint_whose_records_are_intact(copied: RunFolder, finished: keel.Run) -> None:
    lines = copied.metrics.read_bytes().splitlines(keepends=True)
    copied.metrics.write_bytes(b"".join([*lines[:4], lines[4].replace(b"0", b"1"), lines[5]]))
    assert repair(copied) == [f"rounds 1 to 3 are kept; continue with keel resume {copied.path}"]
    assert damages(copied) == []
    assert equal(keel.resume(copied.path), finished)


def test_an_ended_run_is_repaired_by_training_its_lost_rounds_again(ended: RunFolder, finished: keel.Run) -> None:
    flip(ended.checkpoint_file)
    with pytest.raises(DamagedFile, match="restores it if it can"):
        keel.load(ended.path).state_dict()
    with pytest.raises(DamagedFile, match="restores it if it can"):
        keel.resume(ended.path)
    assert repair(ended) == [f"no round can be kept; train all of them again with keel resume {ended.path}"]
    assert equal(keel.resume(ended.path), finished)


def test_repair_restores_spec_summary_and_timings(ended: RunFolder, finished: keel.Run) -> None:
    spec = (ended.path / "spec.toml").read_bytes()
    (ended.path / "spec.toml").write_bytes(spec.replace(b"fedhbm", b"fedavg"))
    lines = ended.timings.read_bytes().splitlines(keepends=True)
    ended.timings.write_bytes(b"".join([lines[0].replace(b"seconds", b"secondz"), *lines[1:]]))
    assert repair(ended) == [
        "spec.toml: restored from the manifest",
        "timings.jsonl: the wall-clock time of 1 round is lost and counts as 0",
    ]
    assert (ended.path / "spec.toml").read_bytes() == spec
    flip(ended.summary_file)
    assert repair(ended) == [f"all 8 rounds are kept; finish the run with keel resume {ended.path}"]
    assert equal(keel.resume(ended.path), finished)


def test_repair_says_what_nothing_can_restore(ended: RunFolder) -> None:
    flip(ended.path / "environment.json")
    with pytest.raises(keel.KeelError, match=r"environment.json' is damaged .*; nothing can restore it: repeat"):
        repair(ended)


def test_a_field_of_the_spec_that_changes_no_result_may_be_edited(ended: RunFolder) -> None:
    file = ended.path / "spec.toml"
    file.write_text(file.read_text().replace('project = "keel"', 'project = "ours"  # a comment'))
    assert "ours" in file.read_text()
    assert damages(ended) == []
    valid = file.read_text()
    file.write_text(valid.replace("project =", "projekt ="))
    with pytest.raises(DamagedFile, match=r"spec.toml' is damaged \(tracking.projekt: extra inputs"):
        keel.resume(ended.path)
    file.write_text(valid.replace("rounds = 8", "rounds = 9"))
    with pytest.raises(DamagedFile, match=r"spec.toml' is damaged \(rounds is not what the run started with\)"):
        keel.resume(ended.path)


def test_a_folder_of_an_earlier_version_is_read_without_checksums(ended: RunFolder, finished: keel.Run) -> None:
    (ended.path / "manifest.json").unlink()
    with pytest.raises(DamagedFile, match=r"manifest.json' is damaged \(it is missing\)"):
        ended.records()
    environment = json.loads((ended.path / "environment.json").read_text())
    del environment["format"]
    (ended.path / "environment.json").write_text(json.dumps(environment))
    ended.metrics.write_text("".join(json.dumps(record) + "\n" for record in finished.records))
    assert ended.records() == finished.records


def test_a_kill_between_the_two_renames_of_a_checkpoint_loses_nothing(copied: RunFolder, finished: keel.Run) -> None:
    copied.checkpoint_file.replace(copied.previous_file)
    assert equal(keel.resume(copied.path), finished)


def test_an_ended_run_keeps_one_checkpoint(ended: RunFolder) -> None:
    assert sorted(file.name for file in ended.checkpoint_file.parent.iterdir()) == ["clients.bin", "state.safetensors"]


def test_the_rows_of_the_last_two_checkpoints_stay(tmp_path: Path) -> None:
    states, saved = ClientStates(tmp_path / "clients.bin"), []
    for value in range(3):
        states.stage(0, {"a": torch.full((4,), float(value))})
        states.commit()
        saved.append(states.save())
        states.saved()
    for value in (1, 2):
        older = ClientStates(tmp_path / "clients.bin")
        older.restore(saved[value])
        assert older[0]["a"][0] == value


def test_the_commands_print_what_is_damaged_and_what_was_restored(ended: RunFolder) -> None:
    def call(*arguments: str | Path) -> Called:
        return call_keel(ended.path, *arguments)

    assert call("verify", ended.path).out == f"{ended.path}: intact\n"
    flip(ended.metrics, 0.1)
    broken = call("verify", ended.path)
    assert broken.code == 1
    assert broken.out.startswith(f"{ended.path}: damaged\n  run: ")
    assert call("repair", ended.path).out == (
        f"no round can be kept; train all of them again with keel resume {ended.path}\n"
    )
    assert call("verify", ended.path).out == f"{ended.path}: intact\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "data.json", "checkpoint/clients.bin"])
def test_an_ended_run_that_is_damaged_is_not_resumed(name: str, ended: RunFolder) -> None:
    flip(ended.path / name, 0.1)
    with pytest.raises(DamagedFile, match=f"{Path(name).name}' is damaged"):
        keel.resume(ended.path)


def test_verify_checks_the_other_runs_if_one_does_not_exist(ended: RunFolder, tmp_path: Path) -> None:
    called = call_keel(tmp_path, "verify", "missing", ended.path)
    assert called.code == 2
    assert called.out == f"{ended.path}: intact\n"
    assert called.err == "keel: run: 'missing' does not exist\n"


def test_verify_leaves_out_the_checkpoints_of_a_run_that_is_being_written(copied: RunFolder) -> None:
    """A process replaces them while they are read."""
    flip(copied.checkpoint_file)
    with copied.locked():
        called = call_keel(copied.path, "verify", copied.path)
    assert (called.code, called.out) == (
        0,
        f"{copied.path}: intact; it is being written, so its checkpoints were not checked\n",
    )
    assert call_keel(copied.path, "verify", copied.path).code == 1


def test_verify_lists_a_file_that_cannot_be_read_and_checks_the_other_runs(
    copied: RunFolder, ended: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RunFolder.seconds

    def seconds(folder: RunFolder) -> list[float]:
        if folder.path == copied.path:
            raise PermissionError(errno.EACCES, "Permission denied", folder.timings)
        return read(folder)

    monkeypatch.setattr(RunFolder, "seconds", seconds)
    called = call_keel(copied.path, "verify", copied.path, ended.path)
    assert called.code == 1
    assert called.out == (
        f"{copied.path}: damaged\n  run: '{copied.timings}' cannot be read (Permission denied)\n{ended.path}: intact\n"
    )


def test_repair_keeps_an_intact_run_of_an_earlier_version(ended: RunFolder, finished: keel.Run) -> None:
    as_earlier_version(ended.path)
    ended.timings.write_bytes(b"")
    assert repair(ended) == ["timings.jsonl: the wall-clock time of 8 rounds is lost and counts as 0"]
    assert ended.records() == finished.records
    assert ended.final_state().round == 8


def test_lost_logs_and_a_lost_checkpoint_folder_are_repaired(ended: RunFolder, finished: keel.Run) -> None:
    ended.metrics.unlink()
    assert repair(ended) == [f"no round can be kept; train all of them again with keel resume {ended.path}"]
    assert equal(keel.resume(ended.path), finished)
    rmtree(ended.checkpoint_file.parent)
    assert "state.safetensors' is damaged (it is missing)" in str(damages(ended)[0])
    assert repair(ended) == [f"no round can be kept; train all of them again with keel resume {ended.path}"]
    assert equal(keel.resume(ended.path), finished)


def test_a_diverged_run_that_has_lost_its_summary_diverges_again(tmp_path: Path) -> None:
    diverged = keel.run({"rounds": 4, "local": {"lr": 1e30}}, out=tmp_path / "run")
    assert diverged.status == "diverged"
    summary = {**diverged.summary, "seconds": None}
    (diverged.path / "summary.json").unlink()
    assert {**keel.resume(diverged.path).summary, "seconds": None} == summary


def test_a_checkpoint_of_this_version_must_have_checksums(ended: RunFolder) -> None:
    with safe_open(ended.checkpoint_file, framework="pt") as content:
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a dict)
        metadata = {key: value for key, value in content.metadata().items() if "sha256" not in key}
    save_file({**tensors, "server/theta": tensors["server/theta"] + 1}, ended.checkpoint_file, metadata)
    with pytest.raises(DamagedFile, match="its checksums are missing"):
        ended.final_state()


def test_folders_above_a_run_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("keel.runs.files.sync", synced.append)
    make_folders(tmp_path / "a" / "b")
    assert {tmp_path, tmp_path / "a"} <= set(synced)


def test_a_checkpoint_of_a_long_run_does_not_hold_its_log_in_memory(ended: RunFolder) -> None:
    state = ended.final_state()
    with ended.metrics.open("ab") as log:
        log.write(b" " * 1000 + b"\n" + (b" " * 1000 + b"\n") * 20_000)
    tracemalloc.start()
    try:
        ended.save(state)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


REPLACED = [
    "spec.toml",
    "manifest.json",
    "metrics.jsonl",
    "timings.jsonl",
    "summary.json",
    "checkpoint",
    "checkpoint/state.safetensors",
    "checkpoint/clients.bin",
    ".metrics.jsonl.new",
    "checkpoint/.state.safetensors.new",
]


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("kind", ["empty", "folder", "pipe", "loop"])
def test_repair_removes_what_is_in_the_place_of_a_file(
    name: str, kind: str, copied: RunFolder, finished: keel.Run
) -> None:
    misplace(copied.path / name, kind)
    if (name, kind) == ("checkpoint", "empty"):
        assert damages(copied) == []  # a run that has not written a checkpoint yet
    elif (name, kind) != ("checkpoint", "folder"):
        assert str(copied.path / name) in str(damages(copied)[0])
        with pytest.raises(DamagedFile):
            keel.resume(copied.path)
        done = repair(copied)
        assert done[0].startswith(f"{name}: ")
    assert damages(copied) == []
    assert equal(keel.resume(copied.path), finished)
    assert kind != "folder" or [file.read_text() for file in copied.path.rglob("letter")] == ["kept"]


def misplace(path: Path, kind: str) -> None:
    """Put something that is not a file in the place of a file."""
    if path.is_dir():
        rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.mkdir()
    if kind == "folder":
        (path / "letter").write_text("kept")


def test_a_folder_in_the_place_of_a_file_that_nothing_restores_stays(copied: RunFolder) -> None:
    misplace(copied.path / "environment.json", "folder")
    with pytest.raises(KeelError, match=r"environment.json' is damaged \(it is not a regular file\); nothing can"):
        repair(copied)
    assert (copied.path / "environment.json" / "letter").exists()


def test_a_file_outside_the_folder_is_read_through_a_link_but_not_changed(copied: RunFolder, tmp_path: Path) -> None:
    outside = copied.clients_file.rename(tmp_path / "outside")
    copied.clients_file.symlink_to(outside)
    before = outside.read_bytes()
    assert damages(copied) == []
    with pytest.raises(KeelError, match=r"clients\.bin' must not be a link; replace it by a copy"):
        keel.resume(copied.path)
    assert outside.read_bytes() == before


def test_checkpoints_are_not_written_through_a_link_to_another_folder(copied: RunFolder, tmp_path: Path) -> None:
    checkpoints = copied.checkpoint_file.parent
    outside = checkpoints.rename(tmp_path / "outside")
    checkpoints.symlink_to(outside)
    flip(outside / "state.safetensors")
    before = {file: file.read_bytes() for file in outside.iterdir()}
    for command in (repair, lambda folder: keel.resume(folder.path)):
        with pytest.raises(KeelError, match=r"checkpoint' must not be a link; replace it by a copy"):
            command(copied)
    assert {file: file.read_bytes() for file in outside.iterdir()} == before


def test_a_temporary_file_is_not_written_through_a_link(copied: RunFolder, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").write_text("mine")
    (copied.path / ".metrics.jsonl.new").symlink_to(outside)
    keel.resume(copied.path)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "loop", "pipe"])
def test_a_lock_that_is_not_a_file_is_an_error(kind: str, copied: RunFolder) -> None:
    misplace(copied.path / ".lock", kind)
    assert not copied.is_being_written()
    for command in (repair, lambda folder: keel.resume(folder.path)):
        with pytest.raises(KeelError, match=r"\.lock' must be a file, which processes lock"):
            command(copied)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint/state.safetensors"])
def test_too_many_open_files_are_no_damage(name: str, copied: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(copied.timings)
    intact = (copied.path / name).read_bytes()
    opened = Path.open

    def limited(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name.endswith(Path(name).name):  # also the checkpoint before the last one
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return opened(path, *arguments, **more)

    def unopened(*_: Any, **__: Any) -> Any:
        raise RuntimeError("unable to open file: Too many open files (24)")

    monkeypatch.setattr(Path, "open", limited)
    if name.endswith("safetensors"):
        monkeypatch.setattr("keel.runs.checked_tensors.safe_open", unopened)
    with pytest.raises(OSError, match="Too many open files"):
        repair(copied)
    monkeypatch.undo()
    assert (copied.path / name).read_bytes() == intact


def test_a_path_that_is_not_unicode_is_an_error_and_no_damage(stopped: Path, tmp_path: Path) -> None:
    path = Path(copytree(stopped, tmp_path / "\udcff"))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for command in (keel.resume, lambda path: repair(RunFolder.open(path))):
        with pytest.raises(KeelError, match="is not valid UTF-8; give the folder another name"):
            command(path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
