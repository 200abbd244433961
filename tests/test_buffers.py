import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keel
import keel.client
import keel.params
import keel.randomness
from keel import KeelError
from keel.runs.folder import RunFolder
from tests.conftest import uneven_data

BASE: dict[str, Any] = {
    "rounds": 4,
    "local": {"batch": 4, "lr": 0.1},
    "participation": {"rate": 0.5},
    "evaluation": {"every": 1},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def run(policy: str | None, out: Path, algorithm: str = "fedavg", **changes: Any) -> keel.Run:
    model = {"buffers": policy} if policy else {}
    data = uneven_data(sizes=(8, 12, 8, 4, 16, 8))
    return keel.run(
        {**BASE, "algorithm": {"name": algorithm}, "model": model, **changes}, model=network(), data=data, out=out
    )


def test_a_model_with_batch_norm_and_no_choice_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(KeelError) as caught:
        run(None, tmp_path / "run")
    assert str(caught.value) == (
        "model.buffers: training changes the buffer 1.running_mean, which is no parameter; accepted: 'average', "
        "'local', 'group_norm' (averaged, kept local, BatchNorm replaced by GroupNorm)"
    )
    assert not (tmp_path / "run").exists()


def test_averaged_statistics_are_the_weighted_mean_of_the_clients(tmp_path: Path) -> None:
    one = run("average", tmp_path / "run", rounds=1, participation={"rate": 1.0})
    data, theta = uneven_data(sizes=(8, 12, 8, 4, 16, 8)), network()
    mean = torch.zeros(4)
    for client in range(6):
        module = network().train()
        held = data.client(client)
        work = keel.client.LocalWork(1, None, 4, False, 0.0, None)
        batches = work.minibatches(len(held), keel.randomness.draws(0, "minibatches", 1, client))
        step = torch.optim.SGD(module.parameters(), lr=0.1)
        for batch in batches:
            step.zero_grad()
            nn.functional.cross_entropy(module(held[batch].inputs), held[batch].targets).backward()
            step.step()
        mean += len(held) / 56 * module[1].running_mean
    torch.testing.assert_close(one.module[1].running_mean, mean)
    assert not torch.equal(theta[1].running_mean, mean)


@pytest.mark.parametrize(("policy", "extra"), [("average", 8), ("local", 0), ("group_norm", 0)])
def test_only_averaged_statistics_travel(policy: str, extra: int, tmp_path: Path) -> None:
    record = run(policy, tmp_path / "run").records[0]
    weights = 5 * 4 + 4 + 4 + 4 + 4 * 3 + 3
    assert record["bytes_up"] == record["bytes_down"] == 3 * 4 * (weights + extra)


def test_local_statistics_stay_with_their_clients(tmp_path: Path) -> None:
    ended = run("local", tmp_path / "run")
    position = RunFolder.open(ended.path).saved_position()
    assert position is not None
    took_part = {client for record in ended.records for client in record["cohort"]}
    assert set(position.memories) == took_part
    assert all(memory["buffers"].shape == (8,) for memory in position.memories.values())
    assert ended.module[1].running_mean is None  # elsewhere a batch has its own statistics


@pytest.mark.parametrize("policy", ["average", "local", "group_norm"])
@pytest.mark.parametrize("algorithm", ["fedhbm", "mimemom", "fedadc"])
def test_a_resumed_run_has_the_same_bits(policy: str, algorithm: str, tmp_path: Path) -> None:
    whole = run(policy, tmp_path / "whole", algorithm)

    def stop(record: dict[str, Any], *_: Any) -> None:
        if record["round"] == 2:
            signal.raise_signal(signal.SIGINT)

    parts = {"model": network(), "data": uneven_data(sizes=(8, 12, 8, 4, 16, 8))}
    table = {**BASE, "algorithm": {"name": algorithm}, "model": {"buffers": policy}}
    stopped = keel.run(table, **parts, out=tmp_path / "stopped", hooks=[stop])
    assert stopped.status == "interrupted"
    resumed = keel.resume(stopped.path, **parts)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert resumed.records == whole.records


def test_group_norm_takes_the_place_of_batch_norm(tmp_path: Path) -> None:
    module = run("group_norm", tmp_path / "run").module
    assert isinstance(module[1], nn.GroupNorm)


def test_a_second_gradient_leaves_the_statistics_alone() -> None:
    model = keel.params.FlatModel(network(), ("1.running_mean", "1.running_var", "1.num_batches_tracked"))
    before = model.buffers()
    model.at(model.weights + 1, torch.randn(6, 5))
    assert before is not None
    torch.testing.assert_close(model.buffers(), before, rtol=0, atol=0)


def test_the_batched_engine_refuses_moving_buffers(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"engine\.name: 'cohort' cannot keep a buffer that training changes"):
        run("average", tmp_path / "run", engine={"name": "cohort"})


def test_tied_and_frozen_parameters(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(5, 5)
            self.second = nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.head = nn.Linear(5, 3)
            self.head.bias.requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(inputs).relu()))

    for algorithm in ("ghbm", "mime"):  # mime asks for the gradient at a second point
        ended = keel.run(
            {**BASE, "algorithm": {"name": algorithm}}, model=Tied(), data=uneven_data(), out=tmp_path / algorithm
        )
        assert ended.summary["parameters"] == 25 + 5 + 5 + 15
        assert ended.module.second.weight is ended.module.first.weight
        assert not torch.equal(ended.module.first.weight, Tied().first.weight)
        assert torch.equal(ended.module.head.bias, Tied().head.bias)
