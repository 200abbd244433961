import signal
from dataclasses import replace
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
from keel.rounds import BUFFERS
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
    assert all(memory[BUFFERS].shape == (8,) for memory in position.memories.values())
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


class Drifting(nn.Module):
    """A buffer that is replaced instead of written into, and read in training; and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * inputs.detach().mean(0)
            self.passes = self.passes + 1
        return self.layer(inputs - self.seen) / (1 + 0.01 * self.passes)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime", "mimelitemom"])
def test_buffers_of_one_client_do_not_reach_another(algorithm: str, tmp_path: Path) -> None:
    """A cohort of one after another gives what each would alone: with all workers, and after a resume."""
    table = {**BASE, "algorithm": {"name": algorithm}, "model": {"buffers": "average"}}
    ended = [
        keel.run({**table, "engine": engine}, model=Drifting(), data=uneven_data(), out=tmp_path / str(number))
        for number, engine in enumerate([{"name": "serial"}, {"name": "pool", "workers": 3}])
    ]
    assert ended[0].records == ended[1].records
    assert ended[0].summary["model_sha256"] == ended[1].summary["model_sha256"]
    assert not torch.equal(ended[0].module.seen, torch.zeros(5))


def test_local_statistics_are_for_batch_norm_alone(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"model\.buffers: 'local', but seen is not BatchNorm's"):
        keel.run({**BASE, "model": {"buffers": "local"}}, model=Drifting(), data=uneven_data(), out=tmp_path / "run")


def test_a_policy_for_a_model_without_such_buffers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"model\.buffers: 'average', but training changes no buffer"):
        keel.run(
            {**BASE, "model": {"buffers": "average"}}, model=nn.Linear(5, 3), data=uneven_data(), out=tmp_path / "a"
        )


def test_a_minibatch_of_one_is_foreseen(tmp_path: Path) -> None:
    table = {**BASE, "model": {"buffers": "average"}}
    with pytest.raises(KeelError, match=r"a minibatch of client 4 has .*local\.drop_last = true"):
        keel.run(table, model=network(), data=uneven_data(sizes=(8, 12, 8, 4, 17, 8)), out=tmp_path / "run")
    dropping = {**table, "local": {**BASE["local"], "drop_last": True}}
    data = uneven_data(sizes=(8, 12, 8, 4, 17, 8))
    assert keel.run(dropping, model=network(), data=data, out=tmp_path / "run").status == "finished"


def test_the_evaluation_of_local_statistics_does_not_depend_on_the_order_of_the_test_examples(tmp_path: Path) -> None:
    data = uneven_data(sizes=(200, 200, 200, 114))
    order = data.test.targets.argsort()
    sorted_test = replace(data, test=data.test[order])
    found = [
        keel.run({**BASE, "model": {"buffers": "local"}}, model=network(), data=d, out=tmp_path / str(n)).accuracy
        for n, d in enumerate([data, sorted_test])
    ]
    assert found[0] == pytest.approx(found[1], abs=0.05)


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
