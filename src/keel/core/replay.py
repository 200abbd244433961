"""One client's loss and gradient by replaying recorded operations, which saves autograd's bookkeeping in every step.

A model is replayed only if the operations that were recorded on one minibatch give, on others and with other weights,
exactly the bits that autograd gives. Each further shape of a minibatch is compared when it is recorded, too. A recorded
program does not run Python: a model that reads the values of tensors is refused, and so is one that changes the state
of its layers or of its loss. State in globals, or a clock, is not seen.
"""

import logging
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keel.core.devices import single_thread
from keel.core.examples import Examples
from keel.core.flat_model import FlatModel, Loss
from keel.core.program import Program
from keel.core.torch_adapter import WorkCounter, has_hooks
from keel.core.torch_randomness import keyed_torch_rng

log = logging.getLogger(__name__)

REPLAY_LIMIT = 100_000
"""The largest work per operation of a model that is replayed. Above it, the overhead of operations does not matter."""
MAX_PROGRAMS = 64
"""How many shapes of minibatches have a program; when there are more, all are recorded again."""
FLOPS_PER_ELEMENT = 40
"""How many floating-point operations take the time of writing one element."""


class LocalGradient:
    """The mean loss of a minibatch and its gradient, at any point."""

    def __init__(self, model: FlatModel, loss: Loss, replayed: bool = False):
        self.model, self.loss, self.replayed = model, loss, replayed
        self.programs: dict[Any, Program | None] = {}
        self._bound: tuple[Program | None, Callable[..., tuple[Tensor, Tensor]]] = None, self._by_autograd

    def __call__(self, point: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient. The next call may overwrite the gradient."""
        program = self._program(point, inputs, targets) if self.replayed else None
        if program is None:
            return self._by_autograd(point, inputs, targets)
        with torch.no_grad():
            if point is not self.model.weights:
                return program.bind(point)(inputs, targets)
            if program is not self._bound[0]:
                self._bound = program, program.bind(point)
            return self._bound[1](inputs, targets)

    def _program(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Program | None:
        """Return the program for tensors of these shapes; None if it differs from autograd."""
        key = tuple((part.shape, part.stride(), part.dtype) for part in (point, inputs, targets))
        if key not in self.programs:
            if len(self.programs) >= MAX_PROGRAMS:
                self.programs.clear()
            self.programs[key] = self._record(point, inputs, targets)
        return self.programs[key]

    def _record(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Program | None:
        try:
            program = Program.of_one_client(self._losses, [point, inputs, targets])
            with torch.no_grad():
                replayed = program.bind(point)(inputs, targets)
        except Exception as error:  # whatever the user's model raises here, autograd decides whether it is an error
            log.debug("a minibatch of shape %s is not replayed: %s", tuple(inputs.shape), error)
            return None
        expected = self._by_autograd(point, inputs, targets)
        return program if all(torch.equal(*pair) for pair in zip(replayed, expected, strict=True)) else None

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
    model: FlatModel, loss: Loss, minibatches: Sequence[Examples], moving: Sequence[str] = ()
) -> LocalGradient:
    """Return the gradient of local training, replayed if the model allows it and gains from it.

    Args:
        minibatches: Transformed examples to try the model on.
        moving: The names of the buffers that training changes.
    """
    if moving or has_hooks(model.module) or model.weights.device.type != "cpu":
        return LocalGradient(model, loss)
    # On copies: the user's module may count its calls.
    small = work_per_operation(model.copy(), loss, minibatches[0]) <= REPLAY_LIMIT
    return LocalGradient(model, loss, replayed=small and _replays(model.copy(), loss, minibatches))


def _replays(model: FlatModel, loss: Loss, minibatches: Sequence[Examples]) -> bool:
    """Return whether the operations recorded on the first minibatch give the bits of autograd on the others."""
    plain, replayed = LocalGradient(model, loss), LocalGradient(model, loss, replayed=True)
    try:
        with single_thread(), keyed_torch_rng(0, "replay"), python_state(model.module, loss) as changed:
            codes = set()
            for minibatch in minibatches:
                inputs, targets = minibatch.inputs, minibatch.targets
                model.weights.add_(torch.randn_like(model.weights), alpha=0.05)
                results = (gradient(model.weights, inputs, targets) for gradient in (replayed, plain))
                equal = all(torch.equal(*pair) for pair in zip(*results, strict=True))
                if None in replayed.programs.values() or not equal:
                    return False
                codes.add(Program.of_one_client(replayed._losses, [model.weights, inputs, targets]).step_code)
            return len(codes) == 1 and changed() is None
    except Exception as error:  # as above
        log.debug("the model is not replayed: %s", error)
        return False


def work_per_operation(model: FlatModel, loss: Loss, minibatch: Examples) -> float:
    """Return the work of an average operation in a local step on a minibatch, in elements written."""
    with single_thread(), python_state(model.module, loss), keyed_torch_rng(0, "work"), WorkCounter() as counter:
        LocalGradient(model, loss)(model.weights, minibatch.inputs, minibatch.targets)
    return (counter.elements + counter.flops / FLOPS_PER_ELEMENT) / max(1, counter.operations)


@contextmanager
def python_state(module: nn.Module, loss: Loss) -> Iterator[Callable[[], str | None]]:
    """Watch the state of Python that a recorded program does not change, and restore the random generators at the end.

    Yields:
        A function that returns what the model or its loss has changed; None if it has changed nothing.
    """
    attributes, python = _attributes(module, loss), random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  the user's model may use it

    def changed() -> str | None:
        now = np.random.get_state()  # noqa: NPY002
        if random.getstate() != python or any(not np.array_equal(*pair) for pair in zip(now, numpy, strict=True)):
            return "the model or its loss draws random numbers from Python or NumPy"
        current = _attributes(module, loss)
        names = sorted(name for name in current.keys() | attributes if current.get(name) != attributes.get(name))
        return f"the forward pass changes {names[0]}" if names else None

    try:
        yield changed
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _attributes(module: nn.Module, loss: Loss) -> dict[str, Any]:
    """Return what the layers of a model and its loss keep in Python, by name; parameters and buffers excluded."""
    loss = getattr(loss, "wrapped", loss)
    owners = {f"the model's attribute {name}.".replace(" .", " "): layer for name, layer in module.named_modules()}
    found = {
        f"{prefix}{name}": _content(value)
        for prefix, layer in owners.items()
        for name, value in vars(layer).items()
        if name not in ("_parameters", "_buffers", "_modules")
    }
    found |= {f"the loss's attribute {name}": _content(value) for name, value in getattr(loss, "__dict__", {}).items()}
    cells = getattr(loss, "__closure__", None) or ()
    return found | {f"the loss's variable {number}": _content(cell) for number, cell in enumerate(cells)}


def _content(value: Any) -> Any:
    """Return the pickled value, by which a change is recognised; the identity of what cannot be pickled."""
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):  # its pickle would hold the weights
        return value.__func__, id(value.__self__)
    try:
        return pickle.dumps(value.cell_contents if isinstance(value, CellType) else value)
    except Exception:  # pickle raises exceptions of many classes, and an empty cell has no contents
        return id(value)
