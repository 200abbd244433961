import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch

import keel
from keel import KeelError
from keel.rounds import Training
from keel.runs import room
from keel.runs.room import room_of
from keel.runs.spec import make_spec
from keel.task import make_task

MODEL = 4 * (64 * 64 + 64 + 64 * 10 + 10)


def training(**tables: Any) -> Training:
    spec = make_spec(tables)
    return Training(spec, make_task(spec))


def test_the_room_is_for_those_who_can_have_taken_part() -> None:
    found = room_of(training(algorithm={"name": "fedhbm"}, rounds=3, participation={"rate": 0.1}))
    assert found.clients == 30
    assert MODEL <= found.memory <= MODEL + 64
    few = room_of(training(algorithm={"name": "fedhbm"}, memory={"keep": 5, "precision": "float16"}))
    assert (few.clients, few.memory < found.memory * 0.6) == (5, True)
    assert room_of(training(algorithm={"name": "fedavg"})).memory == 0


def test_past_models_are_counted() -> None:
    assert room_of(training(algorithm={"name": "ghbm", "tau": 40})).server == 41 * MODEL
    assert room_of(training(algorithm={"name": "ghbm", "tau": 40}, rounds=5)).server == 6 * MODEL


def test_a_run_that_cannot_fit_is_refused_with_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3_100_000
    monkeypatch.setattr(room, "disk_usage", lambda _: SimpleNamespace(free=free))
    table: dict[str, Any] = {"algorithm": {"name": "fedhbm"}}
    with pytest.raises(KeelError) as caught:
        keel.run(table, out=tmp_path / "run")
    assert "100 clients may keep 19.2 kB each" in str(caught.value)
    assert "but the disk has 3.1 MB left" in str(caught.value)
    assert not (tmp_path / "run").exists()
    offered = re.search(
        r"accepted: memory.precision = 'float16', memory.keep = (\d+), rounds = (\d+),", str(caught.value)
    )
    assert offered is not None
    keep, rounds = map(int, offered.groups())
    for memory, fits in ({"precision": "float16"}, True), ({"keep": keep}, True), ({"keep": keep + 1}, False):
        assert (room_of(training(**table, memory=memory)).disk <= free) == fits
    assert room_of(training(**table, rounds=rounds)).disk <= free < room_of(training(**table, rounds=rounds + 1)).disk


def test_what_does_not_help_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(KeelError, match=r"accepted: an algorithm without memory, a folder on another disk$"):
        keel.run({"algorithm": {"name": "fedhbm"}}, out=tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(room, "_machine", lambda: 100_000)
    with pytest.raises(KeelError, match=r"but there are 100.0 kB; accepted: a smaller local.batch, a smaller model$"):
        keel.run({"algorithm": {"name": "fedavg"}, "engine": {"name": "serial"}}, out=tmp_path / "run")


@pytest.mark.parametrize("name", ["fedavg", "fedhbm", "scaffold"])
def test_a_folder_takes_no_more_than_was_told(name: str, tmp_path: Path) -> None:
    table = {"algorithm": {"name": name}, "rounds": 250, "data": {"clients": 400}, "participation": {"rate": 0.005}}
    told: list[room.Room] = []
    keel.run({**table, "local": {"steps": 1}}, out=tmp_path / "run", announce=told.append)
    taken = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert 0.3 * told[0].disk < taken <= told[0].disk


def test_a_process_that_is_not_there_takes_nothing() -> None:
    def ram(name: str, workers: int) -> int:
        return room_of(training(engine={"name": name, "workers": workers})).ram

    assert ram("serial", 1) == ram("serial", 64)
    assert ram("pool", 9) < ram("pool", 10) == ram("pool", 64)  # as many as are in a cohort


def test_kept_pseudo_gradients_are_counted() -> None:
    plain, kept = room_of(training()), room_of(training(evaluation={"deviation": [1, 100]}))
    assert (kept.disk - plain.disk, kept.ram - plain.ram) == (200 * MODEL, 200 * MODEL)


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="only Linux has control groups")
def test_what_a_container_may_have_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CGROUPS", tmp_path)
    whole = room._machine()
    assert whole is not None
    (tmp_path / "memory").mkdir()
    for limit in "memory.max", "memory/memory.limit_in_bytes":
        (tmp_path / limit).write_text(f"{whole // 2}\n")
    assert room._machine() == whole // 2
    for limit in "memory.max", "memory/memory.limit_in_bytes":
        (tmp_path / limit).write_text("max\n")
    assert room._machine() == whole


def test_a_run_that_needs_more_than_the_machine_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_machine", lambda: 100_000)
    with pytest.raises(
        KeelError, match=r"but there are 100.0 kB; accepted: a smaller memory.ram_gb, fewer engine.workers, engine.name"
    ):
        keel.run({"algorithm": {"name": "ghbm"}, "engine": {"name": "pool", "workers": 2}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ram_does_not_grow_with_a_cohort_whose_clients_remember() -> None:
    def ram(rate: float) -> int:
        table = {"algorithm": {"name": "scaffold"}, "engine": {"name": "serial"}, "participation": {"rate": rate}}
        return room_of(training(**table)).ram

    assert ram(1.0) == ram(0.1)


def test_a_round_has_a_few_memories_at_a_time() -> None:
    alive, most = set[int](), 0

    class Counted(torch.Tensor):
        """Told apart from other tensors, so that those alive can be counted."""

    run = training(algorithm={"name": "scaffold"}, engine={"name": "serial"}, participation={"rate": 1.0}, rounds=2)
    position = run.start()
    plain = type(position.memories).__getitem__

    def counted(self: Any, client: int) -> Any:
        nonlocal most
        memory = {name: value.as_subclass(Counted) for name, value in plain(self, client).items()}
        for value in memory.values():
            alive.add(id(value))
            finalize(value, alive.discard, id(value))
        most = max(most, len(alive))
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(position.memories), "__getitem__", counted)
        run.run(position, [])
    assert 0 < most <= 4


def test_a_server_beyond_its_budget_has_the_same_bits(tmp_path: Path) -> None:
    table = {"algorithm": {"name": "ghbm", "tau": 5}, "rounds": 12}
    plain = keel.run(table, out=tmp_path / "plain")
    tight = keel.run({**table, "memory": {"ram_gb": 1e-9}}, out=tmp_path / "tight")
    assert tight.summary["model_sha256"] == plain.summary["model_sha256"]
    assert not list((tmp_path / "tight").rglob(".keel-*"))
    run = training(**table, memory={"ram_gb": 1e-9})
    position = run.start()
    run.run(position, [])
    files = [tensor.untyped_storage().filename is not None for tensor in position.server.values()]
    assert sum(files) >= 4
    assert torch.isfinite(position.server["theta"]).all()
