import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch

import keel
from keel import KeelError
from keel.config.defaults import make_spec
from keel.core import ram
from keel.core.engine import Engine, RoundSize, one_client_footprint
from keel.engines import selection
from keel.runs import resources
from keel.runs.build import Training, build, make_task
from keel.runs.estimate import estimate
from keel.runs.resources import Footprint, footprint_of

MODEL = 4 * (64 * 64 + 64 + 64 * 10 + 10)


def training(**tables: Any) -> Training:
    spec = make_spec(tables)
    return build(spec, make_task(spec))


def test_only_clients_that_can_have_taken_part_are_counted() -> None:
    footprint = footprint_of(training(algorithm={"name": "fedhbm"}, rounds=3, participation={"rate": 0.1}))
    assert footprint.clients == 30
    assert MODEL <= footprint.client_state <= MODEL + 64
    few = footprint_of(training(algorithm={"name": "fedhbm"}, memory={"keep": 5, "precision": "float16"}))
    assert (few.clients, few.client_state < footprint.client_state * 0.6) == (5, True)
    assert footprint_of(training(algorithm={"name": "fedavg"})).client_state == 0


def test_models_of_earlier_rounds_are_counted() -> None:
    assert footprint_of(training(algorithm={"name": "ghbm", "tau": 40})).server == 41 * MODEL
    assert footprint_of(training(algorithm={"name": "ghbm", "tau": 40}, rounds=5)).server == 6 * MODEL


def test_reports_that_are_held_to_be_clipped_are_counted() -> None:
    def ram(algorithm: str, **server: Any) -> int:
        return footprint_of(training(algorithm={"name": algorithm}, server=server)).ram

    assert ram("fedavg", clip="adaptive") - ram("fedavg") == 10 * MODEL
    assert ram("scaffold", clip=1.0) - ram("scaffold") == 10 * (2 + 1) * MODEL  # a report, and the client state


def test_a_run_that_does_not_fit_is_refused_with_settings_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 3_500_000
    monkeypatch.setattr(resources, "disk_usage", lambda _: SimpleNamespace(free=free))
    table: dict[str, Any] = {"algorithm": {"name": "fedhbm"}}
    with pytest.raises(KeelError) as caught:
        keel.run(table, out=tmp_path / "run")
    assert "100 clients with 19.3 kB of state each" in str(caught.value)
    assert "but only 3.5 MB of disk space is free; use one of: " in str(caught.value)
    assert not (tmp_path / "run").exists()
    fixes = re.search(
        r"use one of: memory.precision = 'float16', memory.keep = (\d+), rounds = (\d+),", str(caught.value)
    )
    assert fixes is not None
    keep, rounds = map(int, fixes.groups())
    for memory, fits in ({"precision": "float16"}, True), ({"keep": keep}, True), ({"keep": keep + 1}, False):
        assert (footprint_of(training(**table, memory=memory)).disk <= free) == fits
    assert (
        footprint_of(training(**table, rounds=rounds)).disk
        <= free
        < footprint_of(training(**table, rounds=rounds + 1)).disk
    )


def test_a_footprint_is_a_phrase_for_one_client_and_for_many() -> None:
    many = Footprint(disk=2_000_000, ram=3_000_000, clients=1000, client_state=500, server=0)
    rest = (
        "some stored up to three times for the last two checkpoints) and 3.0 MB of peak memory, not counting the "
        "program and the data"
    )
    assert str(many) == f"up to 2.0 MB on disk (1,000 clients with 500 B of state each, {rest}"
    assert str(replace(many, clients=1)) == f"up to 2.0 MB on disk (1 client with 500 B of state, {rest}"
    assert str(replace(many, client_state=0)).startswith("up to 2.0 MB on disk and 3.0 MB of peak memory")


def test_settings_that_do_not_help_are_not_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(KeelError, match=r"; use one of: an algorithm without client state, a folder on another disk$"):
        keel.run({"algorithm": {"name": "fedhbm"}}, out=tmp_path / "run")
    with pytest.raises(KeelError, match=r"is free; use a folder on another disk$"):
        keel.run({"algorithm": {"name": "fedavg"}}, out=tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(resources, "available_ram", lambda: 100_000)
    with pytest.raises(
        KeelError, match=r"has only 100.0 kB of RAM; use one of: a smaller local.batch, a smaller model$"
    ):
        keel.run({"algorithm": {"name": "fedavg"}, "engine": {"name": "serial"}}, out=tmp_path / "run")


@pytest.mark.parametrize("name", ["fedavg", "fedhbm", "scaffold"])
def test_a_run_folder_takes_no_more_than_estimated(name: str, tmp_path: Path) -> None:
    table = {"algorithm": {"name": name}, "rounds": 250, "data": {"clients": 400}, "participation": {"rate": 0.005}}
    announced: list[resources.Footprint] = []
    keel.run({**table, "local": {"steps": 1}}, out=tmp_path / "run", announce=announced.append)
    taken = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert 0.3 * announced[0].disk < taken <= announced[0].disk


def test_only_processes_that_have_work_are_counted() -> None:
    def ram(name: str, workers: int) -> int:
        return footprint_of(training(engine={"name": name, "workers": workers})).ram

    assert ram("serial", 1) == ram("serial", 64)
    assert ram("pool", 9) < ram("pool", 10) == ram("pool", 64)  # one per client of the cohort


def test_pseudo_gradients_that_are_kept_are_counted() -> None:
    plain, kept = footprint_of(training()), footprint_of(training(evaluation={"deviation": [1, 100]}))
    assert (kept.disk - plain.disk, kept.ram - plain.ram) == (200 * MODEL, 200 * MODEL)


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="only Linux has control groups")
def test_the_limit_of_a_container_is_the_available_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "CGROUPS", tmp_path)
    whole = ram.available_ram()
    assert whole is not None
    (tmp_path / "memory").mkdir()
    for limit in "memory.max", "memory/memory.limit_in_bytes":
        (tmp_path / limit).write_text(f"{whole // 2}\n")
    assert ram.available_ram() == whole // 2
    for limit in "memory.max", "memory/memory.limit_in_bytes":
        (tmp_path / limit).write_text("max\n")
    assert ram.available_ram() == whole


def test_a_run_that_needs_more_than_the_machine_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_ram", lambda: 100_000)
    with pytest.raises(
        KeelError, match=r"only 100.0 kB of RAM; use one of: a smaller memory.ram_gb, fewer engine.workers, engine.name"
    ):
        keel.run({"algorithm": {"name": "ghbm"}, "engine": {"name": "pool", "workers": 2}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ram_does_not_grow_with_the_cohort_of_a_stateful_algorithm() -> None:
    def ram(rate: float) -> int:
        table = {"algorithm": {"name": "scaffold"}, "engine": {"name": "serial"}, "participation": {"rate": rate}}
        return footprint_of(training(**table)).ram

    assert ram(1.0) == ram(0.1)


def test_a_round_has_few_client_states_in_ram() -> None:
    alive, most = set[int](), 0

    class Counted(torch.Tensor):
        """Marks tensors of client states, so that those alive can be counted."""

    run = training(algorithm={"name": "scaffold"}, engine={"name": "serial"}, participation={"rate": 1.0}, rounds=2)
    position = run.loop.start()
    plain = type(position.clients).__getitem__

    def counted(self: Any, client: int) -> Any:
        nonlocal most
        state = {name: value.as_subclass(Counted) for name, value in plain(self, client).items()}
        for value in state.values():
            alive.add(id(value))
            finalize(value, alive.discard, id(value))
        most = max(most, len(alive))
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(position.clients), "__getitem__", counted)
        run.loop.run(position, [])
    assert 0 < most <= 4


def test_server_state_beyond_its_budget_moves_to_files_with_the_same_bits(tmp_path: Path) -> None:
    table = {"algorithm": {"name": "ghbm", "tau": 5}, "rounds": 12}
    plain = keel.run(table, out=tmp_path / "plain")
    tight = keel.run({**table, "memory": {"ram_gb": 1e-9}}, out=tmp_path / "tight")
    assert tight.summary["model_sha256"] == plain.summary["model_sha256"]
    assert not list((tmp_path / "tight").rglob(".keel-*"))
    run = training(**table, memory={"ram_gb": 1e-9})
    position = run.loop.start()
    run.loop.run(position, [])
    files = [tensor.untyped_storage().filename is not None for tensor in position.server.values()]
    assert sum(files) >= 4
    assert torch.isfinite(position.server["theta"]).all()


def test_engines_estimate_their_footprint() -> None:
    size = RoundSize(cohort=10, model=100, client_state=10, activations=1000)
    one = 14 * 100 + 9 * 10 + 2 * 1000
    assert made("serial", 8).footprint(size) == one == one_client_footprint(size)
    assert made("pool", 4).footprint(size) == 8 * 100 + 4 * 10 + 4 * (one + 3 * (100 + 3 * 10))
    group = 10 * (9 * 100 + 8 * 10 + 2 * 1000)
    assert made("cohort", 1).footprint(size) == group
    assert made("cohort", 2).footprint(size) == 8 * 100 + 4 * 10 + group + 3 * 10 * (100 + 3 * 10)


def made(name: str, workers: int) -> Engine:
    return training(engine={"name": name, "workers": workers}).loop.engine


def test_the_trial_of_batching_is_refused_if_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "available_ram", lambda: 19 * MODEL)
    with pytest.raises(
        KeelError, match=r"^engine.name = 'cohort' needs 384.8 kB of memory .* use 'serial' or a smaller"
    ):
        keel.run({"engine": {"name": "cohort"}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_estimate_of_a_run_without_end_is_immediate() -> None:
    spec = make_spec({"rounds": 10**15, "network": {"straggle": 1.0}, "engine": {"name": "serial"}})
    estimated = estimate(spec)
    assert estimated.rounds == 10**15
    assert estimated.federation_seconds is not None
    assert estimated.federation_seconds > 1e12
