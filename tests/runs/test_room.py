from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    monkeypatch.setattr(room, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(KeelError) as caught:
        keel.run({"algorithm": {"name": "fedhbm"}}, out=tmp_path / "run")
    assert "100 clients may keep 19.2 kB each" in str(caught.value)
    assert "memory.precision = 'float16', memory.keep = " in str(caught.value)
    assert not (tmp_path / "run").exists()


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
