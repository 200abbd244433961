"""One client's loss and gradient by replaying recorded operations, which saves autograd's bookkeeping in every step.

A model is replayed only if the operations that were recorded on one minibatch give, on another one and with other
weights, exactly the bits that autograd gives. Whether a model is replayed therefore never changes a result.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keel.core.devices import single_thread
from keel.core.examples import Examples
from keel.core.flat_model import FlatModel, Loss
from keel.core.program import Program
from keel.core.randomness import keyed_torch_rng
from keel.core.torch_adapter import WorkCounter, has_hooks

REPLAY_LIMIT = 100_000
"""The largest work per operation of a model that is replayed. Above it, the overhead of operations does not matter."""
FLOPS_PER_ELEMENT = 40
"""How many floating-point operations take the time of writing one element."""


class LocalGradient:
    """The mean loss of a minibatch and its gradient, at any point."""

    def __init__(self, model: FlatModel, loss: Loss, replayed: bool = False):
        self.model, self.loss, self.replayed = model, loss, replayed
        self.programs: dict[Any, Program] = {}
        self._bound: tuple[Program | None, Callable[..., tuple[Tensor, Tensor]]] = None, self._by_autograd

    def __call__(self, point: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient. The next call may overwrite the gradient."""
        if not self.replayed:
            return self._by_autograd(point, inputs, targets)
        program = self._program(point, inputs, targets)
        with torch.no_grad():
            if point is not self.model.weights:
                return program.bind(point)(inputs, targets)
            if program is not self._bound[0]:
                self._bound = program, program.bind(point)
            return self._bound[1](inputs, targets)

    def _program(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Program:
        key = inputs.shape, inputs.stride(), inputs.dtype, targets.shape, point.stride()
        if key not in self.programs:
            self.programs[key] = Program.of_one_client(self._losses, [point, inputs, targets])
        return self.programs[key]

    def _losses(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model.at(weights, inputs), targets)

    def _by_autograd(self, point: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if point is self.model.weights:
            loss = self.loss(self.model.outputs(inputs), targets).mean()
            return loss.detach(), self.model.gradient(loss)
        leaf = point.detach().requires_grad_()
        loss = self._losses(leaf, inputs, targets).mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient


def local_gradient(
    model: FlatModel, loss: Loss, inputs: Tensor, targets: Tensor, moving: Sequence[str]
) -> LocalGradient:
    """Return the gradient of local training, replayed if the model allows it and gains from it.

    Args:
        inputs: A minibatch, on the model's device.
        targets: Its targets.
        moving: The names of the buffers that training changes.
    """
    if moving or has_hooks(model.module) or model.weights.device.type != "cpu":
        return LocalGradient(model, loss)
    if work_per_operation(model, loss, Examples(inputs, targets)) > REPLAY_LIMIT:
        return LocalGradient(model, loss)
    return LocalGradient(model, loss, replayed=_replays_exactly(model, loss, inputs, targets))


def _replays_exactly(model: FlatModel, loss: Loss, inputs: Tensor, targets: Tensor) -> bool:
    plain, replayed = LocalGradient(model, loss), LocalGradient(model, loss, replayed=True)
    before = model.weights.clone()
    try:
        with single_thread(), keyed_torch_rng(0, "replay"), python_state(model.module) as changed:
            replayed(model.weights, inputs, targets)
            order = torch.randperm(len(inputs))
            inputs, targets = inputs[order], targets[order]
            model.weights.add_(torch.randn_like(before), alpha=0.05)
            pairs = zip(replayed(model.weights, inputs, targets), plain(model.weights, inputs, targets), strict=True)
            return all(torch.equal(*pair) for pair in pairs) and changed() is None
    except Exception:
        return False
    finally:
        model.weights.copy_(before)


def work_per_operation(model: FlatModel, loss: Loss, minibatch: Examples) -> float:
    """Return the work of an average operation in a local step on a minibatch, in elements written."""
    with single_thread(), python_state(model.module), keyed_torch_rng(0, "work"), WorkCounter() as counter:
        LocalGradient(model, loss)(model.weights, minibatch.inputs, minibatch.targets)
    return (counter.elements + counter.flops / FLOPS_PER_ELEMENT) / max(1, counter.operations)


@contextmanager
def python_state(module: nn.Module) -> Iterator[Callable[[], str | None]]:
    """Watch the state of Python that a recorded program does not change, and restore the random generators at the end.

    Yields:
        A function that returns what the model or its loss has changed; None if it has changed nothing.
    """
    attributes, python = _plain_attributes(module), random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  the user's model may use it

    def changed() -> str | None:
        now = np.random.get_state()  # noqa: NPY002
        if random.getstate() != python or any(not np.array_equal(*pair) for pair in zip(now, numpy, strict=True)):
            return "the model or its loss draws random numbers from Python or NumPy"
        current = _plain_attributes(module)
        names = [name for name, value in current.items() if attributes.get(name, value) != value]
        return f"the forward pass changes the model's attribute {names[0]}" if names else None

    try:
        yield changed
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the model and its layers that are plain values."""
    return {
        f"{name}.{attribute}" if name else attribute: value
        for name, layer in module.named_modules()
        for attribute, value in vars(layer).items()
        if isinstance(value, bool | int | float | str | None)
    }
