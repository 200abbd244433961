"""Local optimisers: equal to torch.optim on one client, equal over engines, kept over rounds and resume."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keel.config.defaults import make_spec
from keel.core.loop import Loop
from keel.core.optimizer_trial import is_elementwise
from keel.core.optimizers import PlainSGD, TorchOptimizer
from keel.core.randomness import keyed_rng
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.checkpoint import load_checkpoint, save_checkpoint
from keel.testing.tasks import uneven_loop

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"momentum": 0.9}, lambda p, lr, wd: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=wd)),
    "nesterov": (
        {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
        lambda p, lr, wd: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True, weight_decay=wd),
    ),
    "adam": ({"optimizer": "adam"}, lambda p, lr, wd: torch.optim.Adam(p, lr, weight_decay=wd)),
    "adamw": (
        {"optimizer": "adamw", "betas": [0.8, 0.99]},
        lambda p, lr, wd: torch.optim.AdamW(p, lr, betas=(0.8, 0.99), weight_decay=wd),
    ),
    "adagrad": ({"optimizer": "adagrad"}, lambda p, lr, wd: torch.optim.Adagrad(p, lr, weight_decay=wd)),
    "rmsprop": ({"optimizer": "rmsprop"}, lambda p, lr, wd: torch.optim.RMSprop(p, lr, weight_decay=wd)),
    "torch.optim:NAdam": (
        {"optimizer": "torch.optim:NAdam"},
        lambda p, lr, wd: torch.optim.NAdam(p, lr, weight_decay=wd),
    ),
}
LR, DECAY, ROUNDS = 0.02, 0.1, 4


def trained(local: dict[str, Any], engine: str = "serial", **tables: Any) -> tuple[Loop, TrainingState]:
    loop = uneven_loop(
        {
            "algorithm": {"name": "fedavg"},
            "rounds": ROUNDS,
            "local": {"lr": LR, "weight_decay": DECAY, **local},
            "engine": {"name": engine, "workers": 2},
            **tables,
        }
    )
    state = loop.start()
    assert loop.run(state) == "finished"
    return loop, state


def by_torch(loop: Loop, make: Any, keep: bool, decay_biases: bool = True) -> Tensor:
    """FedAvg with torch's own optimiser on the module's own parameters, written naively."""
    data, theta, kept = loop.task.data, copy.deepcopy(loop.task.module), dict[int, Any]()
    for t in range(1, ROUNDS + 1):
        cohort = loop.sampler.cohort(t).tolist()
        total = sum(len(data.client(client)) for client in cohort)
        mean = [torch.zeros_like(p) for p in theta.parameters()]
        for client in cohort:
            examples, module = data.client(client), copy.deepcopy(theta)
            weights = [p for p in module.parameters() if p.dim() > 1 or decay_biases]
            others = [p for p in module.parameters() if p.dim() == 1 and not decay_biases]
            optimizer = make([{"params": weights}, {"params": others, "weight_decay": 0.0}], LR, DECAY)
            if keep and client in kept:
                optimizer.load_state_dict(kept[client])
            rng = keyed_rng(loop.settings.seed, "minibatches", t, client)
            for batch in loop.local.config.minibatches(len(examples), rng):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(examples.inputs[batch]), examples.targets[batch]).backward()
                optimizer.step()
            kept[client] = copy.deepcopy(optimizer.state_dict())
            for total_of, before, after in zip(mean, theta.parameters(), module.parameters(), strict=True):
                total_of += len(examples) / total * (before - after).detach()
        with torch.no_grad():
            for p, step in zip(theta.parameters(), mean, strict=True):
                p -= step
    return torch.cat([p.detach().reshape(-1) for p in theta.parameters()])


@pytest.mark.parametrize("state", ["reset", "keep"])
@pytest.mark.parametrize("engine", ["serial", "cohort", "pool"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_steps_are_those_of_torch(name: str, engine: str, state: str) -> None:
    local, make = OPTIMIZERS[name]
    loop, final = trained({**local, "optimizer_state": state}, engine)
    expected = by_torch(loop, make, state == "keep")
    assert (expected - loop.initial).norm() > 0.3
    torch.testing.assert_close(final.server["theta"], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_biases_can_be_excluded_from_weight_decay(name: str, engine: str) -> None:
    local, make = OPTIMIZERS[name]
    loop, final = trained({**local, "decay_biases": False}, engine)
    torch.testing.assert_close(final.server["theta"], by_torch(loop, make, False, False), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_plain_sgd_excludes_biases_from_weight_decay(engine: str) -> None:
    loop, final = trained({"decay_biases": False}, engine)
    expected = by_torch(loop, lambda p, lr, wd: torch.optim.SGD(p, lr, weight_decay=wd), False, False)
    torch.testing.assert_close(final.server["theta"], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw", "torch.optim:NAdam"])
def test_pool_has_the_bits_of_serial_with_kept_state(name: str) -> None:
    local = {**OPTIMIZERS[name][0], "optimizer_state": "keep"}
    (_, serial), (_, pool) = trained(local), trained(local, "pool")
    assert torch.equal(serial.server["theta"], pool.server["theta"])
    for client, state in serial.clients.items():
        assert all(torch.equal(pool.clients[client][key], value) for key, value in state.items())


@pytest.mark.parametrize("name", ["adamw", "torch.optim:NAdam"])
def test_kept_state_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    local = {**OPTIMIZERS[name][0], "optimizer_state": "keep"}
    loop, whole = trained(local, rounds=6)
    state = loop.start(tmp_path / "clients.bin")
    assert loop.run(state, [], lambda: state.round == 3) == "interrupted"
    save_checkpoint(tmp_path / "state.safetensors", state)
    restored = load_checkpoint(tmp_path / "state.safetensors", loop.client_states(tmp_path / "clients.bin"))
    assert restored is not None
    loop.run(restored)
    assert torch.equal(restored.server["theta"], whole.server["theta"])


def test_kept_state_counts_a_clients_rounds() -> None:
    _, state = trained({"optimizer": "adam", "optimizer_state": "keep"}, participation={"rate": 1.0})
    assert {int(state.clients[client]["optimizer.rounds"]) for client in state.clients} == {ROUNDS}
    assert all(float(kept["optimizer.step"]) > 0 for kept in (state.clients[client] for client in state.clients))


def test_reset_state_is_not_stored() -> None:
    _, state = trained({"optimizer": "adam"})
    assert len(state.clients) == 0


class SignOfMean(torch.optim.Optimizer):
    """Normalises each tensor: not elementwise."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-8))


def test_an_optimizer_that_is_not_elementwise_gets_the_models_tensors() -> None:
    local = {"optimizer": "tests.core.test_optimizers:SignOfMean"}
    loop, state = trained(local)
    torch.testing.assert_close(
        state.server["theta"], by_torch(loop, lambda p, lr, wd: SignOfMean(p, lr, wd), False), rtol=1e-4, atol=2e-5
    )
    (_, pool) = trained(local, "pool")
    assert torch.equal(pool.server["theta"], state.server["theta"])
    with pytest.raises(KeelError, match=r"local.optimizer is not elementwise"):
        trained(local, "cohort")
    with pytest.raises(KeelError, match=r"optimizer_state = 'keep' requires an elementwise optimiser"):
        trained({**local, "optimizer_state": "keep"})


def test_elementwise_optimizers_are_recognised() -> None:
    names = ["Adam", "AdamW", "Adagrad", "RMSprop", "SGD", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"]
    assert [name for name in names if not is_elementwise(lambda p, n=name: getattr(torch.optim, n)(p, lr=0.1))] == []
    assert not is_elementwise(lambda p: SignOfMean(p, 0.1))


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"optimizer": "adamv"}, r"unknown local.optimizer 'adamv'; did you mean 'adam'"),
        ({"momentum": 1.5, "optimizer": "adam"}, r"local.momentum requires local.optimizer = 'sgd' or 'rmsprop'"),
        ({"nesterov": True}, r"Nesterov momentum requires"),
        ({"optimizer": "torch.optim:LBFGS", "weight_decay": 0.0}, r"closure"),
        ({"optimizer": "adam", "betas": [1.5, 0.9]}, r"Invalid beta parameter"),
        ({"optimizer": "adam", "eps": "small"}, r"local.eps must be a number"),
        ({"optimizer": "builtins:int"}, r"local.optimizer: int\(\) fails"),
        ({"momentun": 0.9}, r"unknown local field 'momentun'; did you mean 'momentum'"),
    ],
)
def test_a_wrong_optimizer_is_one_clear_line(local: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        trained(local)
    assert "\n" not in str(caught.value)


def test_an_optimizer_without_weight_decay_refuses_it() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float):
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])

    shapes = [torch.Size([2, 3])]
    TorchOptimizer(Plain, shapes, [True]).check()
    with pytest.raises(KeelError, match=r"local.weight_decay must be 0 for Plain"):
        TorchOptimizer(Plain, shapes, [True], weight_decay=0.1).check()


def test_settings_of_the_default_optimizer_do_not_apply_to_another_one() -> None:
    table = {"algorithm": {"name": "centralized"}}
    assert make_spec(table).local.settings == {"momentum": 0.9}
    assert make_spec({**table, "local": {"optimizer": "adamw", "eps": 0.1}}).local.settings == {"eps": 0.1}


def test_the_former_momentum_of_centralized_is_that_of_the_optimizer() -> None:
    spec = make_spec({"algorithm": {"name": "centralized", "momentum": 0.5}})
    assert (spec.local.settings, spec.local.optimizer_state) == ({"momentum": 0.5}, "keep")


def test_plain_sgd_by_hand() -> None:
    w = torch.tensor([2.0, 2.0])
    PlainSGD(0.5, torch.tensor([1.0, 0.0])).step(w, torch.tensor([3.0, 3.0]), lr=0.1)
    assert w.tolist() == pytest.approx([2 - 0.1 * (3 + 0.5 * 2), 2 - 0.1 * 3])


@pytest.mark.parametrize("engine", ["serial", "pool"])
def test_a_minibatch_can_be_split_into_microbatches(engine: str) -> None:
    (_, whole), (_, split) = trained({}, engine), trained({"microbatch": 3}, engine)
    assert not torch.equal(split.server["theta"], whole.server["theta"])  # the sums are rounded differently
    torch.testing.assert_close(split.server["theta"], whole.server["theta"], rtol=1e-4, atol=1e-6)


def test_cohort_refuses_microbatches() -> None:
    with pytest.raises(KeelError, match=r"local.microbatch splits minibatches"):
        trained({"microbatch": 3}, "cohort")


def test_a_displacement_is_added_as_it_is_under_every_optimizer() -> None:
    """beta (a - theta) / (tau J) per step: the sum over a round does not depend on the learning rate."""
    tiny = {"lr": 1e-12, "weight_decay": 0.0, "steps": 3}
    for local in ({}, {"optimizer": "adamw"}, {"momentum": 0.9}):
        loop = uneven_loop({"algorithm": {"name": "ghbm", "beta": 1.0, "tau": 1}, "rounds": 1, "local": tiny | local})
        state = loop.start()
        past = loop.initial + 0.1
        state.server = {**state.server, "past.1": past}
        loop.run(state)
        torch.testing.assert_close(state.server["theta"], loop.initial - 0.1, rtol=0, atol=1e-6)
