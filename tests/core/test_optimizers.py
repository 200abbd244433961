"""Local optimisers: equal to torch.optim on one client, equal over engines, kept over rounds and resume."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keel.algorithms.base import Algorithm, ClientContext, Direction, Gradient, Message, State, hyperparameters
from keel.config.defaults import make_spec
from keel.core.client import local_step
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
@pytest.mark.parametrize("engine", ["serial", "cohort"])
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


@pytest.mark.parametrize(("name", "kept"), [("sgd", "keep"), ("adamw", "keep"), ("torch.optim:NAdam", "reset")])
def test_pool_has_the_bits_of_serial(name: str, kept: str) -> None:
    local = {**OPTIMIZERS[name][0], "optimizer_state": kept}
    (_, serial), (_, pool) = trained(local), trained(local, "pool")
    assert bool(serial.clients) == (kept == "keep")
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
    assert {int(state.clients[client]["keel.optimizer.rounds"]) for client in state.clients} == {ROUNDS}
    assert all(float(kept["keel.optimizer.step"]) > 0 for kept in (state.clients[client] for client in state.clients))


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
        ({"nesterov": True}, r"local.nesterov = true requires local.momentum above 0"),
        ({"optimizer": "torch.optim:LBFGS", "weight_decay": 0.0}, r"closure"),
        ({"optimizer": "adam", "betas": [1.5, 0.9]}, r"local.betas must be two numbers from 0 and below 1"),
        ({"optimizer": "adam", "betas": 0.9}, r"local.betas must be two numbers .* \(got 0.9\)"),
        ({"optimizer": "adam", "eps": "small"}, r"local.eps must be a number"),
        ({"momentum": True}, r"local.momentum must be a number from 0 \(got True\)"),
        ({"momentum": 0.9, "nesterov": 1.0}, r"local.nesterov must be true or false"),
        ({"optimizer": "torch.optim:AdamW", "fused": True}, r"local.fused must be false"),
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


class GlobalNorm(SignOfMean):
    """Divides by the norm over all parameters: not elementwise, although tensors may be joined."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.cat([p.grad.reshape(-1) for p in parameters]).norm()
        for p in parameters:
            p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


class CountsInGroup(SignOfMean):
    """Its steps shrink with a counter that is not in `optimizer.state`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        for p in group["params"]:
            self.state[p].setdefault("seen", torch.zeros(()))
            p.sub_(p.grad, alpha=group["lr"] / group["count"])


def test_a_norm_over_all_parameters_is_not_elementwise() -> None:
    assert not is_elementwise(lambda p: GlobalNorm(p, 0.1))


def test_an_optimizer_with_state_in_its_groups_cannot_keep_it() -> None:
    shapes = [torch.Size([2, 3])]
    TorchOptimizer(CountsInGroup, shapes, [True]).check()
    with pytest.raises(KeelError, match=r"requires an optimiser whose whole state is in `optimizer.state`"):
        TorchOptimizer(CountsInGroup, shapes, [True], keep=True).check()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"])
def test_the_state_of_torchs_optimizers_can_be_kept(name: str) -> None:
    settings = {"momentum": 0.9} if name == "SGD" else {}
    TorchOptimizer(getattr(torch.optim, name), [torch.Size([5])], [True], settings=settings, keep=True).check()


def test_kept_adam_survives_float16() -> None:
    """The squares of small gradients are 0 in float16, so that the next step would be divided by epsilon."""
    local = {"optimizer": "adamw", "optimizer_state": "keep", "lr": 0.001}
    results = [trained(local, memory={"precision": precision})[1] for precision in ("float32", "float16", "bfloat16")]
    for other in results[1:]:
        torch.testing.assert_close(other.server["theta"], results[0].server["theta"], rtol=0.05, atol=0.01)


def test_the_fingerprint_tells_settings_apart() -> None:
    settings: list[dict[str, Any]] = [{}, {"betas": (0.9, 0.99)}, {"betas": (0.85, 0.999)}, {"eps": 1e-4}]
    prints = {TorchOptimizer(torch.optim.AdamW, [torch.Size([5])], [True], settings=s).fingerprint for s in settings}
    assert len(prints) == len(settings)


@hyperparameters
class LastTwo(Algorithm):
    """Averages the last two gradients; its step state holds tensors that are overwritten after the step."""

    name = "last_two"
    title = "Last two"
    paper = "none"

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        zero = torch.zeros_like(received["theta"])
        return {"g": zero, "before": zero, "w": zero}

    def direction(
        self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
    ) -> Direction:
        g = gradient(w)
        u = (g + state["g"] + state["before"]) / 3 + 0.1 * (w - state["w"])
        return u, {"g": g, "before": state["g"], "w": w}


def test_a_step_state_is_not_overwritten() -> None:
    table = {"algorithm": LastTwo(), "rounds": 2, "local": {"lr": 0.05}}
    loops = [uneven_loop({**table, "engine": {"name": name, "workers": 1}}) for name in ("serial", "cohort")]
    states = [loop.start() for loop in loops]
    for loop, state in zip(loops, states, strict=True):
        loop.run(state)
    torch.testing.assert_close(states[0].server["theta"], states[1].server["theta"], rtol=1e-4, atol=1e-6)
    # two steps by hand: the second sees the first gradient and the first w
    algorithm, w = LastTwo(), torch.tensor([1.0])
    gradient = torch.tensor([2.0])
    ctx = loops[0].participation.context(1, np.arange(3)).for_client(2)
    step_state = algorithm.init_steps({"theta": w}, {}, ctx)
    step_state = local_step(algorithm, PlainSGD(), w, lambda point: gradient, {"theta": w}, {}, step_state, ctx)
    gradient.fill_(5.0)  # the buffer is overwritten
    assert (step_state["g"].item(), step_state["w"].item()) == (2.0, 1.0)


def test_other_names_in_a_step_state_are_an_error() -> None:
    @hyperparameters
    class Adds(LastTwo):
        def direction(
            self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
        ) -> Direction:
            return gradient(w), {"previous": w}

    loop = uneven_loop({"algorithm": Adds(), "rounds": 1})
    with pytest.raises(KeelError, match=r"Adds.direction must return a step state with the names of init_steps"):
        loop.run(loop.start())


def test_a_reserved_name_in_a_client_state_is_an_error() -> None:
    @hyperparameters
    class Reserved(LastTwo):
        def init_client(self, theta: Tensor) -> State:
            return {"keel.optimizer.m": theta}

    loop = uneven_loop({"algorithm": Reserved(), "rounds": 1})
    with pytest.raises(KeelError, match=r"the name 'keel.optimizer.m' is reserved"):
        loop.run(loop.start())


def test_settings_of_the_default_optimizer_do_not_apply_to_another_one() -> None:
    table = {"algorithm": {"name": "centralized"}}
    assert make_spec(table).local.settings == {"momentum": 0.9}
    assert make_spec({**table, "local": {"optimizer": "sgd"}}).local.settings == {"momentum": 0.9}
    assert make_spec({**table, "local": {"optimizer": "adamw", "eps": 0.1}}).local.settings == {"eps": 0.1}


def test_another_optimizer_has_its_own_default_learning_rate() -> None:
    """The learning rates of a data set are tuned for its default optimiser."""
    table = {"algorithm": {"name": "fedavg"}}
    assert make_spec(table).local.lr == 0.5
    assert make_spec({**table, "local": {"optimizer": "adamw"}}).local.lr == 0.001
    assert make_spec({**table, "local": {"optimizer": "adamw", "lr": 0.02}}).local.lr == 0.02
    assert make_spec({**table, "local": {"optimizer": "sgd"}}).local.lr == 0.5


def test_the_former_momentum_of_centralized_is_that_of_the_optimizer() -> None:
    spec = make_spec({"algorithm": {"name": "centralized", "momentum": 0.5}})
    assert (spec.local.settings, spec.local.optimizer_state) == ({"momentum": 0.5}, "keep")
    with pytest.raises(KeelError, match=r"are one field; remove algorithm.momentum"):
        make_spec({"algorithm": {"name": "centralized", "momentum": 0.5}, "local": {"momentum": 0.9}})
    with pytest.raises(KeelError, match=r"local must be a table"):
        make_spec({"algorithm": {"name": "centralized", "momentum": 0.5}, "local": 5})


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
