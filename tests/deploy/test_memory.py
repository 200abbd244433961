"""What a site remembers is on its disk whole, or as it was before."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy.memory import SiteMemory

TRAINING = "0123456789abcdef" * 2


def test_the_memory_of_the_round_that_counted_last_stays_beside_the_new_one(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, TRAINING)
    for round, last in (1, 0), (2, 1), (3, 1), (5, 3):
        memory.keep(round, {"anchor": torch.full((3,), float(round)), "seen": torch.ones(1)}, last)
    assert [round for round in range(7) if memory.of(round)] == [3, 5]
    kept = SiteMemory(tmp_path, TRAINING).of(5)
    assert kept is not None
    assert kept["anchor"].tolist() == [5.0] * 3


def test_a_process_that_is_late_with_an_older_round_takes_nothing_from_a_newer_one(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, TRAINING)
    for round, last in (3, 0), (6, 3), (5, 3):
        memory.keep_received(round, {"theta": torch.ones(3)})
        memory.keep(round, {"c": torch.full((3,), float(round))}, last)
    assert [round for round in range(8) if memory.of(round)] == [3, 5, 6]
    assert [round for round in range(8) if memory.received(round)] == [5, 6]


def test_processes_of_one_round_write_one_after_the_other(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, TRAINING)
    memory.keep(1, {"c": torch.ones(3)}, 0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: memory.keep(2, {"c": torch.ones(3)}, 1), range(32)))
    assert memory.of(2) is not None


def test_a_memory_is_for_its_owner_alone(tmp_path: Path) -> None:
    SiteMemory(tmp_path, TRAINING).keep(1, {"c": torch.ones(3)}, 0)
    assert (tmp_path / TRAINING).stat().st_mode & 0o777 == 0o700


def test_a_kill_while_it_is_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SiteMemory(tmp_path, TRAINING)
    memory.keep(1, {"c": torch.ones(3)}, 0)

    def die(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        memory.keep(2, {"c": torch.zeros(3)}, 1)
    monkeypatch.undo()
    again = SiteMemory(tmp_path, TRAINING)
    assert again.of(2) is None
    kept = again.of(1)
    assert kept is not None
    assert kept["c"].tolist() == [1.0, 1.0, 1.0]


def test_a_damaged_memory_is_none(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, TRAINING)
    memory.keep(1, {"c": torch.ones(3)}, 0)
    (tmp_path / TRAINING / "memory-1.safetensors").write_bytes(b"cos\nsystem\n")
    assert memory.of(1) is None


def test_trainings_do_not_share_memories_and_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    SiteMemory(tmp_path, TRAINING).keep(1, {"c": torch.ones(3)}, 0)
    assert SiteMemory(tmp_path, TRAINING[::-1]).of(1) is None
    with pytest.raises(KeelError, match="hexadecimal"):
        SiteMemory(tmp_path, "../../elsewhere")


def test_it_is_kept_in_the_precision_of_the_spec(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, TRAINING, "float16")
    memory.keep(1, {"c": torch.tensor([1 / 3])}, 0)
    kept = memory.of(1)
    assert kept is not None
    assert kept["c"].dtype == torch.float32
    assert kept["c"].item() == torch.tensor(1 / 3).half().float().item()
