"""A replayed model gives the bits of autograd; a model that cannot be replayed is left to autograd."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keel.core import client
from keel.core.flat_model import FlatModel
from keel.core.replay import LocalGradient, local_gradient
from keel.core.task import per_example_cross_entropy
from tests.conftest import uneven_loop
from tests.core.test_program import EXAMPLES, MODULES, InPlace


def minibatch(name: str) -> tuple[Tensor, Tensor]:
    return MODULES[name][1]()[0], torch.randint(0, 3, (EXAMPLES,))


@pytest.mark.parametrize("name", MODULES)
def test_replayed_gradients_have_the_bits_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    model = FlatModel(MODULES[name][0]())
    replayed = local_gradient(model, per_example_cross_entropy, *minibatch(name), ())
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


class Counting(InPlace):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs) * (1 if self.calls < 100 else 2)


class Branching(InPlace):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if inputs.sum() > 0 else super().forward(-inputs)


class Drawing(InPlace):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1 if random.random() < 2 else 0)


def hooked() -> nn.Module:
    module = InPlace()
    module.last.register_forward_hook(lambda *_: None)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "Python state": lambda: Counting(),
    "a branch on values": lambda: Branching(),
    "Python's random numbers": lambda: Drawing(),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout()),
    "hooks": hooked,
    "large operations": lambda: nn.Sequential(nn.Linear(6, 300_000), nn.Linear(300_000, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_cannot_be_replayed_or_gains_nothing_is_left_to_autograd(name: str) -> None:
    torch.manual_seed(0)
    module = OTHERS[name]()
    if isinstance(module, Counting):
        module.calls = 1  # an instance attribute, as a user's __init__ would set
    model = FlatModel(module)
    before = model.weights.clone()
    assert not local_gradient(model, per_example_cross_entropy, *minibatch("linear"), ()).replayed
    assert torch.equal(model.weights, before)


def test_buffers_that_training_changes_are_left_to_autograd() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), ["1.running_mean", "1.running_var"])
    assert not local_gradient(model, per_example_cross_entropy, *minibatch("linear"), ["1.running_mean"]).replayed


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
