"""Client states between their rounds: a dict on disk, in the stored precision, safe against interrupts."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError
from keel.core.client_state import ClientStates, to_mapped_file
from keel.testing.tasks import uneven_loop


def client_state(value: float, size: int = 7) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), value), "count": torch.tensor(int(value)), "last": torch.tensor(value)}


def update(states: ClientStates, new: dict[int, dict[str, torch.Tensor]]) -> None:
    for client, state in new.items():
        states.stage(client, state)
    states.commit()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.booleans()), max_size=30))
def test_it_behaves_as_a_dict_and_a_checkpoint_as_a_copy_of_it(history: list[tuple[int, int, bool]]) -> None:
    states, expected, copy = ClientStates(), {}, None
    for client, value, save in history:
        update(states, {client: client_state(value)})
        expected[client] = value
        if save:
            table = states.save()
            states.saved()
            copy = dict(expected)
    assert {client: float(state["last"]) for client, state in states.items()} == expected
    if copy is not None:
        states.restore(table)
        assert {client: float(state["a"][-1]) for client, state in states.items()} == copy
        assert all(int(state["count"]) == copy[client] for client, state in states.items())


def test_the_file_stays_as_small_as_four_generations_of_states(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "clients.bin")
    for t in range(20):
        update(states, {client: client_state(t, 1000) for client in range(3)})
        if t % 2:
            states.save()
            states.saved()
    assert (tmp_path / "clients.bin").stat().st_size <= 4 * 3 * states.row_bytes


def test_only_the_latest_participants_are_kept() -> None:
    states = ClientStates(keep=2)
    for client in (1, 2, 1, 3):
        update(states, {client: client_state(client)})
    assert list(states) == [1, 3]
    assert states.get(2) is None


@pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_model_sized_floats_are_stored_in_the_given_precision(precision: str, width: int) -> None:
    states = ClientStates(precision=precision, parameters=3)  # type: ignore[arg-type]
    update(states, {0: {"a": torch.tensor([1.0, 2.5, -3.0]), "count": torch.tensor([2**40])}})
    assert states.row_bytes == 3 * width + 8
    assert states[0]["a"].dtype == torch.float32
    assert states[0]["a"].tolist() == [1.0, 2.5, -3.0]
    assert states[0]["count"].tolist() == [2**40]


def test_a_state_of_another_shape_is_refused() -> None:
    states = ClientStates()
    update(states, {0: client_state(1)})
    with pytest.raises(KeelError, match="must have the same names, shapes and dtypes"):
        update(states, {1: client_state(1, size=8)})


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "clients.bin")
    update(states, {0: client_state(1), 1: client_state(2)})
    table = states.save()
    (tmp_path / "clients.bin").write_bytes(b"short")
    with pytest.raises(KeelError, match=r"clients.bin' is damaged"):
        ClientStates(tmp_path / "clients.bin").restore(table)


def test_a_mapped_tensor_is_equal_and_leaves_no_file(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    moved = to_mapped_file(tensor, tmp_path)
    assert torch.equal(moved, tensor)
    assert to_mapped_file(moved, tmp_path) is moved
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_commit_frees_no_row_in_use() -> None:
    states = ClientStates()
    update(states, {0: client_state(1), 1: client_state(2)})
    states.stage(0, client_state(3))
    states.stage(1, client_state(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_release", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            states.commit()
    states.discard()
    update(states, {2: client_state(5), 3: client_state(6)})
    assert float(states[1]["last"]) == 2
    assert {client: float(states[client]["last"]) for client in (2, 3)} == {2: 5, 3: 6}


def _interrupt(row: int | None) -> None:
    raise KeyboardInterrupt


def test_a_discarded_round_changes_nothing(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "clients.bin")
    update(states, {0: client_state(1), 1: client_state(2)})
    for t in range(5):
        states.stage(0, client_state(10 + t))
        states.stage(2, client_state(20 + t))
        assert {client: float(state["last"]) for client, state in states.items()} == {0: 1, 1: 2}
        states.discard()
    update(states, {2: client_state(3)})
    assert {client: float(state["last"]) for client, state in states.items()} == {0: 1, 1: 2, 2: 3}
    assert (tmp_path / "clients.bin").stat().st_size == 4 * states.row_bytes


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_does_not_change_tensors_that_are_not_model_sized(precision: str) -> None:
    states = ClientStates(precision=precision, parameters=3)  # type: ignore[arg-type]
    state = {"a": torch.ones(3), "round": torch.tensor([261]), "scale": torch.tensor([261.03125])}
    update(states, {0: state})
    assert states[0]["round"].tolist() == [261]
    assert states[0]["scale"].tolist() == [261.03125]
    assert states[0]["scale"].dtype == torch.float32


@pytest.mark.parametrize("name", ["adabest", "fedhbm"])
def test_half_precision_does_not_change_a_round_counter(name: str) -> None:
    """bfloat16 rounds 261 to 260, so that AdaBest and FedHBM divided by zero."""
    shared = {"rounds": 265, "participation": {"rate": 1.0}, "local": {"steps": 1, "lr": 0.01}}
    memory = {"memory": {"precision": "bfloat16"}, "evaluation": {"every": 265, "last": 1}}
    loop = uneven_loop({"algorithm": {"name": name}, **shared, **memory})
    training_state = loop.start()
    training_state.round = 256
    assert loop.run(training_state) == "finished"
    assert [int(state["last"]) for state in training_state.clients.values()] == [265] * 6


def test_a_row_is_complete_where_a_system_call_transfers_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads and writes at most 2 GiB per call."""
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: read(file, [views[0][:10]], offset))
    monkeypatch.setattr(os, "pwritev", lambda file, views, offset: write(file, [views[0][:10]], offset))
    states = ClientStates()
    update(states, {0: client_state(1), 1: client_state(2)})
    assert states[1]["a"].tolist() == [2.0] * 7
    assert float(states[0]["last"]) == 1


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "clients.bin")
    update(states, {0: client_state(1)})
    os.truncate(tmp_path / "clients.bin", 5)
    with pytest.raises(OSError, match="shorter than it was"):
        states[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_state_keeps_its_dtype(precision: str, dtype: torch.dtype) -> None:
    states = ClientStates(precision=precision, parameters=3)  # type: ignore[arg-type]
    for value in (1, 2):
        update(states, {0: {"small": torch.full((1,), value, dtype=dtype), "model": torch.full((3,), float(value))}})
    assert states[0]["small"].dtype == dtype
    assert states[0]["model"].dtype == torch.float32
