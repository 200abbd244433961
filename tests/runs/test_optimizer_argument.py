"""The argument `optimizer` of keel.run, keel.resume and keel.compare."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import keel
from keel.errors import KeelError
from keel.testing.tasks import small_network, uneven_data

SPEC: dict[str, Any] = {
    "rounds": 4,
    "algorithm": {"name": "fedavg"},
    "local": {"epochs": 1, "lr": 0.01},
    "participation": {"rate": 0.5},
}
TASK: dict[str, Any] = {"model": small_network(), "data": uneven_data()}


def final(run: keel.Run) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.module.parameters()])


def test_a_class_is_the_same_as_its_name(tmp_path: Path) -> None:
    by_class = keel.run(SPEC, **TASK, optimizer=torch.optim.AdamW, out=tmp_path / "class")
    by_name = keel.run(SPEC, **TASK, optimizer="adamw", out=tmp_path / "name")
    in_spec = keel.run({**SPEC, "local": {**SPEC["local"], "optimizer": "adamw"}}, **TASK, out=tmp_path / "spec")
    assert torch.equal(final(by_class), final(by_name))
    assert torch.equal(final(in_spec), final(by_name))
    assert (by_class.spec.local.optimizer, by_name.spec.local.optimizer) == ("custom", "adamw")


def test_a_run_with_a_passed_optimizer_is_resumed_with_the_same(tmp_path: Path) -> None:
    spec = {**SPEC, "local": {**SPEC["local"], "optimizer_state": "keep"}}
    make = partial(torch.optim.AdamW, betas=(0.8, 0.9))
    whole = keel.run(spec, **TASK, optimizer=make, out=tmp_path / "whole")
    rounds: list[int] = []

    def stop() -> bool:
        rounds.append(1)
        return len(rounds) == 2

    part = keel.run(spec, **TASK, optimizer=make, out=tmp_path / "part", stop=stop)
    assert part.status == "interrupted"
    with pytest.raises(KeelError, match=r"pass .*optimizer again"):
        keel.resume(tmp_path / "part", **TASK)
    with pytest.raises(KeelError, match=r"optimizer was passed as an object"):
        keel.resume(tmp_path / "part", **TASK, optimizer="adamw")
    with pytest.raises(KeelError, match=r"optimizer differs .*: AdamW as then, but other settings"):
        keel.resume(tmp_path / "part", **TASK, optimizer=partial(torch.optim.AdamW, betas=(0.5, 0.9)))
    with pytest.raises(KeelError, match=r"optimizer differs .*: AdamW then, SGD now"):
        keel.resume(tmp_path / "part", **TASK, optimizer=torch.optim.SGD)
    assert torch.equal(final(keel.resume(tmp_path / "part", **TASK, optimizer=make)), final(whole))


def test_a_passed_optimizer_conflicts_with_settings_of_the_spec(tmp_path: Path) -> None:
    spec = {**SPEC, "local": {**SPEC["local"], "momentum": 0.9}}
    with pytest.raises(KeelError, match=r"local.momentum = 0.9 conflicts with optimizer="):
        keel.run(spec, **TASK, optimizer=torch.optim.SGD, out=tmp_path / "run")
    with pytest.raises(KeelError, match=r"set local.weight_decay instead of weight_decay=0.1 in the partial"):
        keel.run(SPEC, **TASK, optimizer=partial(torch.optim.SGD, weight_decay=0.1), out=tmp_path / "run")
    with pytest.raises(KeelError, match=r"not an instance: pass optimizer=SGD"):
        keel.run(SPEC, **TASK, optimizer=torch.optim.SGD(small_network().parameters()), out=tmp_path / "run")
    with pytest.raises(KeelError, match=r"local.optimizer must make a torch.optim.Optimizer"):
        keel.run(SPEC, **TASK, optimizer=lambda parameters, lr: lr, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_methods_are_compared_with_a_passed_optimizer(tmp_path: Path) -> None:
    comparison = keel.compare(
        ["fedavg", "ghbm"], seeds=1, spec={**SPEC, "algorithm": None}, **TASK, optimizer=torch.optim.Adam,
        out=tmp_path, progress=False,
    )  # fmt: skip
    assert [row["status"] for row in comparison.rows()] == ["finished", "finished"]
