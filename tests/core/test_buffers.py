"""Buffers that training changes, such as the running statistics of BatchNorm."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keel
from keel import KeelError
from keel.core.client import LocalConfig
from keel.core.flat_model import FlatModel
from keel.core.randomness import keyed_rng
from keel.core.training_state import BUFFERS
from keel.runs.folder import RunFolder
from tests.conftest import uneven_data

BASE: dict[str, Any] = {
    "rounds": 4,
    "local": {"batch": 4, "lr": 0.1},
    "participation": {"rate": 0.5},
    "evaluation": {"every": 1},
    "engine": {"name": "serial"},
}
SIZES = (8, 12, 8, 4, 16, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def run(policy: str | None, out: Path, algorithm: str = "fedavg", **changes: Any) -> keel.Run:
    model = {"buffers": policy} if policy else {}
    table = {**BASE, "algorithm": {"name": algorithm}, "model": model, **changes}
    return keel.run(table, model=network(), data=uneven_data(sizes=SIZES), out=out)


def test_batch_norm_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError) as caught:
        run(None, tmp_path / "run")
    assert str(caught.value) == (
        "model.buffers must be one of 'average', 'local', 'group_norm', since training changes the buffer "
        "1.running_mean (averaged over clients, kept local, or BatchNorm replaced by GroupNorm)"
    )
    assert not (tmp_path / "run").exists()


def test_averaged_statistics_are_the_weighted_mean_over_the_clients(tmp_path: Path) -> None:
    result = run("average", tmp_path / "run", rounds=1, participation={"rate": 1.0})
    data, initial = uneven_data(sizes=SIZES), network()
    mean = torch.zeros(4)
    for client in range(6):
        module = network().train()
        examples = data.client(client)
        config = LocalConfig(1, None, 4, False, 0.0, None)
        batches = config.minibatches(len(examples), keyed_rng(0, "minibatches", 1, client))
        for batch in batches:
            module.zero_grad()
            nn.functional.cross_entropy(module(examples[batch].inputs), examples[batch].targets).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
        mean += len(examples) / sum(SIZES) * module[1].running_mean
    torch.testing.assert_close(result.module[1].running_mean, mean)
    assert not torch.equal(initial[1].running_mean, mean)


@pytest.mark.parametrize(("policy", "extra"), [("average", 8), ("local", 0), ("group_norm", 0)])
def test_only_averaged_statistics_are_sent(policy: str, extra: int, tmp_path: Path) -> None:
    record = run(policy, tmp_path / "run", rounds=1).records[0]
    weights = 5 * 4 + 4 + 4 + 4 + 4 * 3 + 3
    assert record["bytes_up"] == record["bytes_down"] == 3 * 4 * (weights + extra)


def test_local_statistics_are_kept_in_the_client_states(tmp_path: Path) -> None:
    result = run("local", tmp_path / "run")
    state = RunFolder.open(result.path).checkpoint()
    assert state is not None
    participants = {client for record in result.records for client in record["cohort"]}
    assert set(state.clients) == participants
    assert all(client_state[BUFFERS].shape == (8,) for client_state in state.clients.values())
    assert result.module[1].running_mean is None  # the server's model uses the statistics of each batch


@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [
        *((policy, "fedhbm") for policy in ("average", "local", "group_norm")),
        *((policy, "mimemom") for policy in ("average", "local")),  # its probes pass through the model too
    ],
)
def test_resume_gives_the_same_bits(policy: str, algorithm: str, tmp_path: Path) -> None:
    whole = run(policy, tmp_path / "whole", algorithm)

    def interrupt(record: dict[str, Any], *_: Any) -> None:
        if record["round"] == 2:
            signal.raise_signal(signal.SIGINT)

    objects = {"model": network(), "data": uneven_data(sizes=SIZES)}
    table = {**BASE, "algorithm": {"name": algorithm}, "model": {"buffers": policy}}
    stopped = keel.run(table, **objects, out=tmp_path / "stopped", hooks=[interrupt])
    assert stopped.status == "interrupted"
    resumed = keel.resume(stopped.path, **objects)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert resumed.records == whole.records


class RunningMean(nn.Module):
    """Subtracts a running mean, in a buffer that training replaces instead of writing into it; and counts passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
            self.passes = self.passes + 1
        return self.layer(inputs - self.mean) / (1 + 0.01 * self.passes)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
def test_buffers_of_one_client_do_not_reach_another(algorithm: str, tmp_path: Path) -> None:
    table = {**BASE, "algorithm": {"name": algorithm}, "model": {"buffers": "average"}}
    serial, pool = (
        keel.run({**table, "engine": engine}, model=RunningMean(), data=uneven_data(), out=tmp_path / engine["name"])
        for engine in ({"name": "serial"}, {"name": "pool", "workers": 3})
    )
    assert serial.records == pool.records
    assert serial.summary["model_sha256"] == pool.summary["model_sha256"]
    assert not torch.equal(serial.module.mean, torch.zeros(5))


def test_the_local_policy_supports_only_batch_norm(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"model\.buffers = 'local' supports only BatchNorm \(got mean\)"):
        keel.run({**BASE, "model": {"buffers": "local"}}, model=RunningMean(), data=uneven_data(), out=tmp_path / "run")


def test_a_policy_for_a_model_without_moving_buffers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"model\.buffers = 'average', but training changes no buffer"):
        keel.run(
            {**BASE, "model": {"buffers": "average"}}, model=nn.Linear(5, 3), data=uneven_data(), out=tmp_path / "a"
        )


def test_a_minibatch_of_one_example_is_refused_before_the_first_round(tmp_path: Path) -> None:
    table = {**BASE, "model": {"buffers": "average"}}
    with pytest.raises(KeelError, match=r"minibatch of one example, which client 4 has .*local\.drop_last = true"):
        keel.run(table, model=network(), data=uneven_data(sizes=(8, 12, 8, 4, 17, 8)), out=tmp_path / "run")
    drop_last = {**table, "rounds": 1, "local": {**BASE["local"], "drop_last": True}}
    data = uneven_data(sizes=(8, 12, 8, 4, 17, 8))
    assert keel.run(drop_last, model=network(), data=data, out=tmp_path / "run").status == "finished"


@pytest.mark.parametrize("microbatch", [1, 3])
def test_a_microbatch_of_one_example_is_refused_before_the_first_round(microbatch: int, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"minibatch of one example, which client 0 has .*local\.microbatch"):
        run("average", tmp_path / "run", local={**BASE["local"], "microbatch": microbatch})
    assert run("average", tmp_path / "run", local={**BASE["local"], "microbatch": 2}, rounds=1).status == "finished"


def test_one_held_out_example_is_refused_where_it_would_be_normalised_by_itself(tmp_path: Path) -> None:
    one_each = {"every": 1, "clients": 6}  # a fifth of eight examples is one
    with pytest.raises(KeelError, match=r"evaluation\.clients: client 0 is evaluated on one example alone, which"):
        run("local", tmp_path / "run", evaluation=one_each, local={**BASE["local"], "drop_last": True})
    data = replace(uneven_data(sizes=SIZES), test=uneven_data().test[torch.arange(1)])
    with pytest.raises(KeelError, match=r"evaluation\.on = 'test' has one example, which model\.buffers = 'local'"):
        keel.run({**BASE, "model": {"buffers": "local"}}, model=network(), data=data, out=tmp_path / "run")


def test_evaluation_with_local_statistics_does_not_depend_on_the_order_of_the_test_examples(tmp_path: Path) -> None:
    data = uneven_data(sizes=(200, 200, 200, 114))
    order = data.test.targets.argsort()
    sorted_test = replace(data, test=data.test[order])
    table = {**BASE, "rounds": 2, "model": {"buffers": "local"}}
    accuracies = [
        keel.run(table, model=network(), data=d, out=tmp_path / str(n)).accuracy
        for n, d in enumerate([data, sorted_test])
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.05)


def test_group_norm_replaces_batch_norm(tmp_path: Path) -> None:
    module = run("group_norm", tmp_path / "run", rounds=1).module
    assert isinstance(module[1], nn.GroupNorm)


def test_a_gradient_at_another_point_leaves_the_statistics_unchanged() -> None:
    model = FlatModel(network(), ("1.running_mean", "1.running_var", "1.num_batches_tracked"))
    before = model.buffers()
    model.at(model.weights + 1, torch.randn(6, 5))
    assert before is not None
    torch.testing.assert_close(model.buffers(), before, rtol=0, atol=0)


def test_the_batched_engine_refuses_moving_buffers(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"engine\.name.*cohort.*buffer"):
        run("average", tmp_path / "run", engine={"name": "cohort"})


def test_tied_parameters_stay_tied_and_frozen_ones_unchanged(tmp_path: Path) -> None:
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

    for algorithm in ("ghbm", "mime"):  # mime needs the gradient at a second point
        table = {**BASE, "algorithm": {"name": algorithm}}
        result = keel.run(table, model=Tied(), data=uneven_data(), out=tmp_path / algorithm)
        assert result.summary["parameters"] == 25 + 5 + 5 + 15
        assert result.module.second.weight is result.module.first.weight
        assert not torch.equal(result.module.first.weight, Tied().first.weight)
        assert torch.equal(result.module.head.bias, Tied().head.bias)
