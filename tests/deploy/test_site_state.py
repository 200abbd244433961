"""Client state on a site's disk: complete or absent, and kept for the last round that the server counted."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy.new import new_federation
from keel.deploy.site_state import SiteState
from keel.deploy.state_folder import state_folder

TRAINING = "0123456789abcdef" * 2


def test_the_state_of_the_last_counted_round_is_kept_with_the_newest(tmp_path: Path) -> None:
    state = SiteState(tmp_path, TRAINING)
    for round, last_round in (1, 0), (2, 1), (3, 1), (5, 3):
        state.save(round, {"anchor": torch.full((3,), float(round)), "seen": torch.ones(1)}, last_round)
    assert [round for round in range(7) if state.load(round)] == [3, 5]
    loaded = SiteState(tmp_path, TRAINING).load(5)
    assert loaded is not None
    assert loaded["anchor"].tolist() == [5.0] * 3


def test_a_process_that_is_late_with_an_older_round_keeps_the_newer_state(tmp_path: Path) -> None:
    state = SiteState(tmp_path, TRAINING)
    for round, last_round in (3, 0), (6, 3), (5, 3):
        state.save_broadcast(round, {"theta": torch.ones(3)})
        state.save(round, {"c": torch.full((3,), float(round))}, last_round)
    assert [round for round in range(8) if state.load(round)] == [3, 5, 6]
    assert [round for round in range(8) if state.load_broadcast(round)] == [5, 6]


def test_processes_of_the_same_round_write_one_after_the_other(tmp_path: Path) -> None:
    state = SiteState(tmp_path, TRAINING)
    state.save(1, {"c": torch.ones(3)}, 0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: state.save(2, {"c": torch.ones(3)}, 1), range(32)))
    assert state.load(2) is not None


def test_only_the_owner_can_read_the_folder(tmp_path: Path) -> None:
    SiteState(tmp_path, TRAINING).save(1, {"c": torch.ones(3)}, 0)
    assert (tmp_path / TRAINING).stat().st_mode & 0o777 == 0o700


def test_a_crash_while_writing_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SiteState(tmp_path, TRAINING)
    state.save(1, {"c": torch.ones(3)}, 0)

    def crash(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        state.save(2, {"c": torch.zeros(3)}, 1)
    monkeypatch.undo()
    restarted = SiteState(tmp_path, TRAINING)
    assert restarted.load(2) is None
    loaded = restarted.load(1)
    assert loaded is not None
    assert loaded["c"].tolist() == [1.0, 1.0, 1.0]


def test_a_damaged_state_counts_as_missing(tmp_path: Path) -> None:
    state = SiteState(tmp_path, TRAINING)
    state.save(1, {"c": torch.ones(3)}, 0)
    (tmp_path / TRAINING / "state-1.safetensors").write_bytes(b"cos\nsystem\n")
    assert state.load(1) is None


def test_trainings_share_no_state_and_their_id_cannot_be_a_path(tmp_path: Path) -> None:
    SiteState(tmp_path, TRAINING).save(1, {"c": torch.ones(3)}, 0)
    assert SiteState(tmp_path, TRAINING[::-1]).load(1) is None
    with pytest.raises(KeelError, match="hexadecimal"):
        SiteState(tmp_path, "../../elsewhere")


def test_state_is_kept_in_the_precision_of_the_spec(tmp_path: Path) -> None:
    state = SiteState(tmp_path, TRAINING, "float16", parameters=1)
    state.save(1, {"c": torch.tensor([1 / 3])}, 0)
    loaded = state.load(1)
    assert loaded is not None
    assert loaded["c"].dtype == torch.float32
    assert loaded["c"].item() == torch.tensor(1 / 3).half().float().item()


def test_the_folder_is_the_nodes_state_dir_or_the_deprecated_memory(caplog: pytest.LogCaptureFixture) -> None:
    assert state_folder({"state-dir": "/srv/state"}, "site-0") == Path("/srv/state")
    assert state_folder({}, "site-0").name == "site-0"
    assert caplog.text == ""
    assert state_folder({"memory": "/srv/memory"}, "site-0") == Path("/srv/memory")
    assert "'memory' is deprecated; rename it to 'state-dir'" in caplog.text


def test_half_precision_applies_to_model_sized_tensors_only(tmp_path: Path) -> None:
    state = SiteState(tmp_path, TRAINING, "bfloat16", parameters=3)
    state.save(1, {"c": torch.ones(3), "last": torch.tensor([261]), "scale": torch.tensor([261.03125])}, 0)
    loaded = state.load(1)
    assert loaded is not None
    assert loaded["last"].tolist() == [261]
    assert loaded["scale"].tolist() == [261.03125]
    assert loaded["c"].dtype == torch.float32


@pytest.mark.parametrize("settings", [[], ['data="/srv/patients.csv"']])
def test_start_site_needs_no_settings(settings: list[str], tmp_path: Path) -> None:
    new_federation(tmp_path / "study", 3, "fedavg")
    command = tmp_path / "bin" / "keel"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o700)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    script = ["/bin/sh", "start_site.sh", "0", "127.0.0.1:1", *settings]
    called = subprocess.run(script, cwd=tmp_path / "study", env=environment, capture_output=True, text=True, timeout=30)
    assert called.returncode == 0, called.stderr
    state = tmp_path / "study" / "client-state" / "site-0"
    assert " ".join(["site=0", f'state-dir="{state}"', *settings]) in called.stdout


def test_a_flipped_byte_in_a_state_is_found(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "0" * 32)
    state.save(1, {"a": torch.ones(50)}, 0)
    (file,) = state.folder.glob("state-1.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert state.load(1) is None
