"""Full gradients at a client: over chunks, with augmentation, dropout and buffers."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keel.core.client import full_gradient, probe_client
from keel.core.flat_model import FlatModel
from keel.core.loop import Loop
from keel.testing.tasks import uneven_loop

CLIENT = 4
"""The client with most examples, 16."""


def parts(loop: Loop, module: nn.Module | None = None, **changes: Any) -> tuple[Any, FlatModel, Any]:
    """The local training with some fields changed, a model, and the examples of the client."""
    model = FlatModel(loop.task.module if module is None else module)
    return replace(loop.engine.local, **changes), model, loop.task.data.client_examples(CLIENT)  # type: ignore[attr-defined]


def expected_gradient(model: FlatModel, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model.module(inputs), targets)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, model.parameters)])


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_a_full_gradient_is_that_of_all_examples_whatever_the_chunks(chunk: int) -> None:
    loop = uneven_loop({})
    local, model, examples = parts(loop, chunk=chunk)
    ctx = loop.participation.context(1, np.arange(3))
    everything = loop.task.data.client(CLIENT)
    expected = expected_gradient(model, everything.inputs, everything.targets)
    torch.testing.assert_close(full_gradient(local, model, CLIENT, examples, ctx), expected, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class Shifted:
    """Shifts each input by a random amount."""

    random = True

    def draw(self, examples: int, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=(examples, 1))

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return inputs if choices is None else inputs + torch.from_numpy(choices).float()


def test_a_full_gradient_has_the_augmentation_of_its_round_and_client() -> None:
    loop = uneven_loop({})
    local, model, examples = parts(loop, transform=Shifted())

    def gradient(round: int, client: int) -> Tensor:
        ctx = loop.participation.context(round, np.arange(3))
        return full_gradient(local, model, client, examples, ctx).clone()

    first = gradient(1, CLIENT)
    assert torch.equal(first, gradient(1, CLIENT))
    plain = full_gradient(parts(loop)[0], model, CLIENT, examples, loop.participation.context(1, np.arange(3)))
    others = [plain, gradient(2, CLIENT), gradient(1, 0)]
    assert not any(torch.allclose(first, other) for other in others)


def test_the_dropout_of_a_probe_depends_on_its_round_and_client_only() -> None:
    loop = uneven_loop({})
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    local, model, examples = parts(loop, module)
    theta = model.weights.clone()

    def probe(round: int, client: int, caller_seed: int) -> Tensor:
        torch.manual_seed(caller_seed)
        ctx = loop.participation.context(round, np.arange(3))
        return probe_client(local, model, client, examples, {"theta": theta}, ctx)["gradient"].clone()

    first = probe(1, CLIENT, 0)
    assert torch.equal(first, probe(1, CLIENT, 1))
    assert not torch.allclose(first, probe(2, CLIENT, 0))
    assert not torch.allclose(first, probe(1, 0, 0))


def test_a_probe_starts_from_the_buffers_it_received() -> None:
    loop = uneven_loop({})

    class Scaled(nn.Module):
        """Multiplies by a buffer that each pass changes."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.linear(inputs) * self.scale
            self.scale = self.scale + 0.0
            return outputs

    local = loop.engine.local  # type: ignore[attr-defined]
    model, examples = FlatModel(Scaled(), moving=["scale"]), loop.task.data.client_examples(CLIENT)
    ctx, received = loop.participation.context(1, np.arange(3)), {"theta": model.weights.clone()}

    def probe(scale: float) -> Tensor:
        return probe_client(local, model, CLIENT, examples, received, ctx, torch.tensor([scale]))["gradient"].clone()

    assert torch.equal(probe(1.0), probe(1.0))
    assert not torch.allclose(probe(1.0), probe(3.0))
