"""A replayed model gives the bits of autograd; a model that cannot be replayed is left to autograd."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import keel
from keel.core import client, replay
from keel.core.examples import Examples
from keel.core.flat_model import FlatModel
from keel.core.losses import per_example_cross_entropy
from keel.core.replay import LocalGradient, local_gradient
from tests.conftest import uneven_loop
from tests.core.test_program import EXAMPLES, MODULES, InPlace


def minibatch(name: str) -> tuple[Tensor, Tensor]:
    return MODULES[name][1]()[0], torch.randint(0, 3, (EXAMPLES,))


def trials(name: str) -> list[Examples]:
    return [Examples(*minibatch(name)) for _ in range(3)]


@pytest.mark.parametrize("name", MODULES)
def test_replayed_gradients_have_the_bits_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    model = FlatModel(MODULES[name][0]())
    replayed = local_gradient(model, per_example_cross_entropy, trials(name))
    assert replayed.replayed
    plain = LocalGradient(model, per_example_cross_entropy)
    for size in (EXAMPLES, EXAMPLES, EXAMPLES - 2):
        inputs, targets = (part[:size] for part in minibatch(name))
        model.weights.add_(torch.randn_like(model.weights), alpha=0.1)
        for point in (model.weights, model.weights + 0.1):
            loss, gradient = (part.clone() for part in replayed(point, inputs, targets))
            expected_loss, expected = plain(point, inputs, targets)
            assert torch.equal(loss, expected_loss)
            assert torch.equal(gradient, expected)


class Network(InPlace):
    """A user's class; `change` is what its forward pass does besides."""

    def __init__(self, change: Callable[["Network", Tensor], Tensor | float]) -> None:
        super().__init__()
        self.change, self.calls, self.history, self.rng = change, 0, [0.0], np.random.default_rng(0)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.change(self, inputs)


def counted(network: Network, inputs: Tensor) -> float:
    network.calls += 1
    return 1.0 if network.calls < 100 else 2.0


def remembered(network: Network, inputs: Tensor) -> float:
    network.history.append(0.0)
    return 1.0 if len(network.history) < 100 else 2.0


def created(network: Network, inputs: Tensor) -> float:
    network.seen = True  # type: ignore[assignment]
    return 1.0


def hooked() -> nn.Module:
    module = InPlace()
    module.last.register_forward_hook(lambda *_: None)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a counter": lambda: Network(counted),
    "a list": lambda: Network(remembered),
    "a new attribute": lambda: Network(created),
    "a generator of the model": lambda: Network(lambda network, inputs: float(network.rng.random() < 2)),
    "a branch on values": lambda: Network(lambda network, inputs: 1 if inputs.sum() > 0 else 2),
    "values as a list": lambda: Network(lambda network, inputs: max(inputs.sum(1).tolist())),
    "values as an array": lambda: Network(lambda network, inputs: float(inputs.numpy().max())),
    "values as a shape": lambda: Network(lambda network, inputs: len(inputs[inputs > 0])),
    "a comparison": lambda: Network(lambda network, inputs: 2 if torch.equal(inputs, inputs.abs()) else 1),
    "Python's random numbers": lambda: Network(lambda network, inputs: float(random.random() < 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout()),
    "hooks": hooked,
    "large operations": lambda: nn.Sequential(nn.Linear(6, 300_000), nn.Linear(300_000, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_cannot_be_replayed_or_gains_nothing_is_left_to_autograd(name: str) -> None:
    torch.manual_seed(0)
    model = FlatModel(OTHERS[name]())
    before = model.weights.clone()
    assert not local_gradient(model, per_example_cross_entropy, trials("linear")).replayed
    assert torch.equal(model.weights, before)


class Counter:
    """An object whose method changes it."""

    def __init__(self) -> None:
        self.calls = 0

    def one(self) -> float:
        self.calls += 1
        return 1.0


@pytest.mark.parametrize("counts", [False, True])
def test_a_method_that_a_model_keeps_is_not_a_change_unless_its_object_changes(counts: bool) -> None:
    torch.manual_seed(0)
    module = Network(lambda network, inputs: network.kept() if counts else 1.0)  # type: ignore[operator]
    module.kept = Counter().one if counts else module.last.forward  # type: ignore[assignment]
    model = FlatModel(module)
    assert local_gradient(model, per_example_cross_entropy, trials("linear")).replayed is not counts


def test_buffers_that_training_changes_are_left_to_autograd() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), ["1.running_mean", "1.running_var"])
    assert not local_gradient(model, per_example_cross_entropy, trials("linear"), ["1.running_mean"]).replayed


def test_the_model_that_is_trained_is_not_called_for_the_check() -> None:
    model = FlatModel(Network(counted))
    local_gradient(model, per_example_cross_entropy, trials("linear"))
    assert model.module.calls == 0


class Turned(nn.Module):
    """A product that is transposed: computed the other way round, its bits differ for some sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(2, 31, 20)), nn.Linear(40, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.bmm(inputs.expand(2, -1, -1), self.weight).transpose(1, 2).permute(2, 0, 1).flatten(1))


def test_every_size_of_a_minibatch_has_the_bits_of_autograd() -> None:
    torch.manual_seed(0)
    model = FlatModel(Turned())
    inputs, targets = torch.randn(32, 31), torch.randint(0, 3, (32,))
    replayed = local_gradient(model, per_example_cross_entropy, [Examples(inputs, targets)])
    plain = LocalGradient(model, per_example_cross_entropy)
    assert replayed.replayed
    for size in range(1, 33):
        results = [gradient(model.weights, inputs[:size], targets[:size]) for gradient in (replayed, plain)]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), size


def test_a_size_that_cannot_be_replayed_is_left_to_autograd() -> None:
    model = FlatModel(Network(lambda network, inputs: 1.0 if len(inputs) == EXAMPLES else float(inputs.sum())))
    replayed = local_gradient(model, per_example_cross_entropy, trials("linear"))
    assert replayed.replayed
    inputs, targets = (part[:2] for part in minibatch("linear"))
    loss, gradient = replayed(model.weights, inputs, targets)
    expected_loss, expected = LocalGradient(model, per_example_cross_entropy)(model.weights, inputs, targets)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected)


def test_programs_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_PROGRAMS", 2)
    model = FlatModel(nn.Linear(6, 3))
    gradient = local_gradient(model, per_example_cross_entropy, trials("linear"))
    for size in range(1, EXAMPLES + 1):
        gradient(model.weights, *(part[:size] for part in minibatch("linear")))
        assert len(gradient.programs) <= 2


@keel.hyperparameters
class Noisy(keel.Algorithm):
    name = "noisy"
    title = "Noisy"

    def direction(self, w, gradient, received, state, ctx):  # type: ignore[no-untyped-def]
        found = gradient(w)
        return found + 0.01 * torch.randn_like(found)


def test_random_numbers_of_an_algorithm_do_not_depend_on_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Tensor:
        loop = uneven_loop({"algorithm": Noisy(), "engine": {"name": "serial"}, "rounds": 2})
        state = loop.start()
        loop.run(state)
        return state.server["theta"]

    replayed = trained()
    monkeypatch.setattr(replay, "REPLAY_LIMIT", 0)
    assert torch.equal(trained(), replayed)


def test_serial_replays_small_models() -> None:
    assert uneven_loop({"engine": {"name": "serial"}}).engine.gradient_of.replayed  # type: ignore[attr-defined]


def test_minibatches_are_gathered_with_their_own_random_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shift:
        """Adds to each example the number that was drawn for it."""

        random = True

        def draw(self, examples: int, rng: np.random.Generator) -> np.ndarray:
            return rng.integers(0, 1000, (examples, 1))

        def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
            return inputs if choices is None else inputs + torch.from_numpy(choices)

    loop = uneven_loop({"engine": {"name": "serial"}})
    local, examples = loop.engine.local, loop.task.data.client_examples(0)  # type: ignore[attr-defined]
    local = client.LocalTraining(local.algorithm, local.loss, local.config, local.seed, Shift())
    minibatches = local.minibatches(len(examples), 1, 0)
    expected = [
        Shift()(examples[indices].inputs, choices)
        for indices, choices in zip(
            minibatches, local.augmentations([*map(len, minibatches)], "preparation", 1, 0), strict=True
        )
    ]
    for elements in (1, 50, 1 << 22):
        monkeypatch.setattr(client, "GATHERED", elements)
        gathered = [inputs for inputs, _ in local.gathered(examples, minibatches, 1, 0)]
        assert all(torch.equal(*pair) for pair in zip(gathered, expected, strict=True))
