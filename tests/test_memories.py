from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError
from keel.memories import Memories, on_disk


def memory(value: float, size: int = 7) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), value), "seen": torch.tensor(int(value)), "last": torch.tensor(value)}


def update(memories: Memories, new: dict[int, dict[str, torch.Tensor]]) -> None:
    for client, kept in new.items():
        memories.stage(client, kept)
    memories.commit()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.booleans()), max_size=30))
def test_it_is_a_dict_and_a_checkpoint_is_a_copy_of_it(history: list[tuple[int, int, bool]]) -> None:
    memories, naive, copy = Memories(), {}, None
    for client, value, save in history:
        update(memories, {client: memory(value)})
        naive[client] = value
        if save:
            table = memories.save()
            memories.saved()
            copy = dict(naive)
    assert {client: float(kept["last"]) for client, kept in memories.items()} == naive
    if copy is not None:
        memories.restore(table["clients"], table["rows"], table["form"])
        assert {client: float(kept["a"][-1]) for client, kept in memories.items()} == copy
        assert all(int(kept["seen"]) == copy[client] for client, kept in memories.items())


def test_the_file_holds_those_who_took_part_and_little_more(tmp_path: Path) -> None:
    memories = Memories(tmp_path / "memories.bin")
    for turn in range(20):
        update(memories, {client: memory(turn, 1000) for client in range(3)})
        if turn % 2:
            memories.save()
            memories.saved()
    assert (tmp_path / "memories.bin").stat().st_size <= 3 * 3 * memories.row_bytes


def test_only_the_clients_seen_last_are_kept() -> None:
    memories = Memories(keep=2)
    for client in (1, 2, 1, 3):
        update(memories, {client: memory(client)})
    assert list(memories) == [1, 3]
    assert memories.get(2) is None


@pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_floats_are_kept_in_the_precision_asked_for(precision: str, width: int) -> None:
    memories = Memories(precision=precision)  # type: ignore[arg-type]
    update(memories, {0: {"a": torch.tensor([1.0, 2.5, -3.0]), "count": torch.tensor([2**40])}})
    assert memories.row_bytes == 3 * width + 8
    assert memories[0]["a"].dtype == torch.float32
    assert memories[0]["a"].tolist() == [1.0, 2.5, -3.0]
    assert memories[0]["count"].tolist() == [2**40]


def test_a_memory_of_another_form_is_refused() -> None:
    memories = Memories()
    update(memories, {0: memory(1)})
    with pytest.raises(KeelError, match="changes its form"):
        update(memories, {1: memory(1, size=8)})


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    memories = Memories(tmp_path / "memories.bin")
    update(memories, {0: memory(1), 1: memory(2)})
    table = memories.save()
    (tmp_path / "memories.bin").write_bytes(b"short")
    with pytest.raises(KeelError, match=r"memories.bin' is damaged"):
        Memories(tmp_path / "memories.bin").restore(table["clients"], table["rows"], table["form"])


def test_a_tensor_on_disk_is_the_same_and_leaves_no_file(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    moved = on_disk(tensor, tmp_path)
    assert torch.equal(moved, tensor)
    assert on_disk(moved, tmp_path) is moved
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_is_broken_off_frees_nothing_that_is_in_use() -> None:
    memories = Memories()
    update(memories, {0: memory(1), 1: memory(2)})
    memories.stage(0, memory(3))
    memories.stage(1, memory(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "_release", _break_off)
        with pytest.raises(KeyboardInterrupt):
            memories.commit()
    memories.discard()
    update(memories, {2: memory(5), 3: memory(6)})
    assert float(memories[1]["last"]) == 2
    assert {client: float(memories[client]["last"]) for client in (2, 3)} == {2: 5, 3: 6}


def _break_off(row: int | None) -> None:
    raise KeyboardInterrupt


def test_a_round_that_is_given_up_changes_nothing(tmp_path: Path) -> None:
    memories = Memories(tmp_path / "memories.bin")
    update(memories, {0: memory(1), 1: memory(2)})
    for turn in range(5):
        memories.stage(0, memory(10 + turn))
        memories.stage(2, memory(20 + turn))
        assert {client: float(kept["last"]) for client, kept in memories.items()} == {0: 1, 1: 2}
        memories.discard()
    update(memories, {2: memory(3)})
    assert {client: float(kept["last"]) for client, kept in memories.items()} == {0: 1, 1: 2, 2: 3}
    assert (tmp_path / "memories.bin").stat().st_size == 4 * memories.row_bytes
