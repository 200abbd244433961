"""The optimiser of local steps: plain SGD, or a class of torch.optim on the flat vector of weights.

An elementwise optimiser gives the same result on one flat vector as on the tensors of the model, and the rows of a
cohort do not interact in it. Whether an optimiser is elementwise is tried when a run starts. One that is not, such as
one that normalises each tensor, gets the model's tensors, one client at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from keel.algorithms.base import ClientState
from keel.core.client_state import OPTIMIZER
from keel.core.optimizer_trial import MakeOptimizer, accepts, is_elementwise, weights_after_steps
from keel.core.torch_randomness import keyed_torch_rng
from keel.errors import KeelError

ROUNDS = OPTIMIZER + "rounds"
"""In how many rounds a kept state was used; 0 for a client that has none yet."""


class Steps(Protocol):
    """An optimiser during one round of a client, or of the clients of a batched cohort."""

    def step(self, w: Tensor, u: Tensor, lr: float) -> None:
        """Take a step on `w` in place, with the direction `u` in the place of the gradient.

        In a cohort `w` has the rows of the clients that still train, which are the first ones.
        """

    def client_state(self) -> ClientState:
        """What a client keeps of the optimiser's state; {} if it is reset in every round."""


class LocalOptimizer(Protocol):
    """The optimiser of all clients."""

    @property
    def elementwise(self) -> bool:
        """Whether each weight's step depends on its own gradients alone."""

    @property
    def vectors(self) -> int:
        """How many vectors of the model's size its state has during a round, for the resource estimate."""

    def init_client(self, theta: Tensor) -> ClientState:
        """The optimiser state of a client before its first round; {} if it is reset in every round."""

    def start(self, w: Tensor, state: ClientState) -> Steps:
        """Begin a round at the weights `w`, which the steps change."""


@dataclass(frozen=True)
class PlainSGD:
    """w <- w - lr (u + weight_decay w).

    Args:
        decayed: 1 where weight decay applies, 0 elsewhere; None if it applies to all weights.
    """

    weight_decay: float = 0.0
    decayed: Tensor | None = None
    elementwise = True
    vectors = 0

    def init_client(self, theta: Tensor) -> ClientState:
        return {}

    def start(self, w: Tensor, state: ClientState) -> Steps:
        return self

    def step(self, w: Tensor, u: Tensor, lr: float) -> None:
        if self.weight_decay and self.decayed is None:
            w.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            w.addcmul_(w, self.decayed.to(w.device), value=-lr * self.weight_decay)  # type: ignore[union-attr]
        w.sub_(u, alpha=lr)

    def client_state(self) -> ClientState:
        return {}


@dataclass(frozen=True)
class TorchOptimizer:
    """A class of torch.optim.

    Args:
        make: The class, or a function that makes the optimiser of parameters.
        shapes: The shapes of the model's tensors, in the order of the flat vector.
        decays: Whether weight decay applies to each of the tensors.
        keep: Whether a client keeps the optimiser's state between its rounds.
    """

    make: MakeOptimizer
    shapes: Sequence[Size]
    decays: Sequence[bool]
    weight_decay: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False

    @property
    def name(self) -> str:
        make = getattr(self.make, "func", self.make)  # of a functools.partial
        return getattr(make, "__name__", type(make).__name__)

    @cached_property
    def elementwise(self) -> bool:
        """Whether each weight's step depends on its own gradients alone."""
        return is_elementwise(self.made)

    def check(self) -> None:
        """Raise a KeelError if the optimiser cannot be made or take a step, or if its state cannot be kept."""
        for field_name in ("lr", "weight_decay"):
            if field_name in getattr(self.make, "keywords", {}):
                value = self.make.keywords[field_name]  # type: ignore[attr-defined]
                raise KeelError(f"optimizer: set local.{field_name} instead of {field_name}={value!r} in the partial")
        weights = torch.ones(sum(shape.numel() for shape in self.shapes))
        try:
            with keyed_torch_rng(0, "optimizer"):
                self.start(weights, self.init_client(weights)).step(weights, torch.ones_like(weights), 1e-3)
        except KeelError:
            raise
        except Exception as error:  # whatever the user's class raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
            if "closure" in reason:
                reason = "it calls a closure, which local steps do not have; use another one"
            raise KeelError(f"local.optimizer: {self.name}({settings}) fails: {reason}") from None
        if self.keep and not self.elementwise:
            raise KeelError(
                f"local.optimizer_state = 'keep' requires an elementwise optimiser (got {self.name}); use 'reset'"
            )
        if self.keep and not self._survives_rounds():
            raise KeelError(
                "local.optimizer_state = 'keep' requires an optimiser whose whole state is in `optimizer.state` after "
                f"its first step (got {self.name}); use 'reset'"
            )

    def _survives_rounds(self) -> bool:
        """Return whether two rounds of three steps are the same as six steps."""
        trial = TorchOptimizer(self.make, [Size([4])], [True], self.weight_decay, self.settings, keep=True)
        state = trial.init_client(torch.zeros(4))
        kept, single = torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4)
        whole = trial.start(single, state)
        with keyed_torch_rng(0, "optimizer"):
            for number in range(6):
                if number % 3 == 0:
                    steps = trial.start(kept, state)
                gradient = torch.cos(torch.arange(4.0) + number)
                steps.step(kept, gradient, 0.1)
                whole.step(single, gradient, 0.1)
                state = steps.client_state()
        return torch.allclose(kept, single, rtol=1e-5, atol=1e-7)

    @cached_property
    def vectors(self) -> int:
        return sum(example is None for _, example in self._template) if self.elementwise else 2

    @property
    def fingerprint(self) -> str:
        """The name and the result of a few steps, rounded, by which another optimiser or setting is recognised."""
        if not self.elementwise:  # it may require tensors of other shapes than the trial's
            return self.name
        weights = weights_after_steps(self.made, lambda vector: [vector], lr=0.5)
        return f"{self.name} {sha256(' '.join(f'{w:.4g}' for w in weights.tolist()).encode()).hexdigest()[:12]}"

    def init_client(self, theta: Tensor) -> ClientState:
        if not self.keep:
            return {}
        state = {name: torch.zeros_like(theta) if value is None else _stored(value) for name, value in self._template}
        return {ROUNDS: torch.zeros(1, dtype=torch.int64), **{OPTIMIZER + name: value for name, value in state.items()}}

    def start(self, w: Tensor, state: ClientState) -> Steps:
        return _TorchSteps(self, w, state)

    @cached_property
    def _template(self) -> list[tuple[str, Any]]:
        """The names of the optimiser's state, each with an example, or None for a tensor like the weights."""
        weights = torch.ones(3)
        optimizer = self.made([weights])
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        template = []
        for name, value in optimizer.state[weights].items():
            is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
            if isinstance(value, Tensor) and value.shape == weights.shape:
                template.append((name, None))
            elif is_number:
                template.append((name, value))
            elif value is not None:
                raise KeelError(f"local.optimizer_state = 'keep' cannot store {name!r} of {self.name}; use 'reset'")
        return template

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector, or of all rows of a matrix, in order: the parameters of the optimiser."""
        if self.elementwise:  # as few as possible
            return [*torch.split(vector, [size for _, size in self._runs], dim=-1)]
        tensors = torch.split(vector, [shape.numel() for shape in self.shapes])
        return [tensor.view(shape) for tensor, shape in zip(tensors, self.shapes, strict=True)]

    @cached_property
    def part_decays(self) -> list[bool]:
        """Whether weight decay applies to each of the parts."""
        return [decays for decays, _ in self._runs] if self.elementwise else [*self.decays]

    @cached_property
    def _runs(self) -> list[tuple[bool, int]]:
        """The elements of consecutive tensors with and without weight decay."""
        pairs = zip(self.decays, (shape.numel() for shape in self.shapes), strict=True)
        return [(on, sum(size for _, size in run)) for on, run in groupby(pairs, lambda pair: pair[0])]

    def made(self, parameters: Sequence[Tensor] | Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimiser of these parameters or parameter groups. Its learning rate is set in each step."""
        decay = {"weight_decay": self.weight_decay} if accepts(self.make, "weight_decay") else {}
        if self.weight_decay and not decay:
            raise KeelError(f"local.weight_decay must be 0 for {self.name}, which has none (got {self.weight_decay:g})")
        optimizer = self.make(parameters, lr=1.0, **decay, **self.settings)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise KeelError(f"local.optimizer must make a torch.optim.Optimizer (got {type(optimizer).__name__})")
        if any(group.get("fused") for group in optimizer.param_groups):
            raise KeelError("local.fused must be false: fused kernels require contiguous tensors (got true)")
        return optimizer


class _TorchSteps:
    """An optimiser of torch.optim during one round.

    In a cohort its parameters are matrices with a row per client, or, if clients keep their state, single rows: the
    number of steps since a state was new differs from client to client.
    """

    def __init__(self, config: TorchOptimizer, w: Tensor, state: ClientState):
        self.config, self.single_rows = config, config.keep and w.dim() == 2
        vectors = [*w] if self.single_rows else [w]
        self.parts = [config.parts(vector) for vector in vectors]
        self.optimizer = config.made(self._groups())
        if self.single_rows:
            for group in self.optimizer.param_groups:
                if group.get("foreach", False) is None:
                    group["foreach"] = True  # all rows in one call
        self.rounds = state.get(ROUNDS)
        if config.keep:
            if self.rounds is None:
                raise KeelError("a client state of this run has no optimiser state: start the run again")
            self._load(state)

    def _groups(self) -> list[dict[str, Any]]:
        by_decay: dict[bool, list[Tensor]] = {True: [], False: []}
        for parts in self.parts:
            for part, decays in zip(parts, self.config.part_decays, strict=True):
                by_decay[decays].append(part)
        groups: list[dict[str, Any]] = [{"params": by_decay[True]}] if by_decay[True] else []
        return groups + ([{"params": by_decay[False], "weight_decay": 0.0}] if by_decay[False] else [])

    def step(self, w: Tensor, u: Tensor, lr: float) -> None:
        if w.dim() == 2 and not self.single_rows and len(self.parts[0][0]) > len(w):
            self._narrow(w)
        directions = [self.config.parts(row) for row in (u if self.single_rows else [u])]
        for row, parts in enumerate(self.parts):
            for number, part in enumerate(parts):
                part.grad = directions[row][number] if row < len(directions) else None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _narrow(self, w: Tensor) -> None:
        """Continue with the first rows of a matrix."""
        state = self.optimizer.state
        old, self.parts = self.parts[0], [self.config.parts(w)]
        for before, part in zip(old, self.parts[0], strict=True):
            state[part] = {
                name: value[: len(w)] if isinstance(value, Tensor) and value.shape == before.shape else value
                for name, value in state.pop(before, {}).items()
            }
        for group, renewed in zip(self.optimizer.param_groups, self._groups(), strict=True):
            group["params"] = renewed["params"]

    def _load(self, state: ClientState) -> None:
        rows = [_row(state, row) for row in range(len(self.parts))] if self.single_rows else [state]
        for parts, kept in zip(self.parts, rows, strict=True):
            if not int(kept[ROUNDS]):
                continue
            for name, example in self.config._template:
                stored = kept[OPTIMIZER + name]
                values = self.config.parts(stored) if example is None else [stored] * len(parts)
                for part, value in zip(parts, values, strict=True):
                    self.optimizer.state[part][name] = value.clone() if example is None else _restored(value, example)

    def client_state(self) -> ClientState:
        if not self.config.keep:
            return {}
        assert self.rounds is not None
        kept = {ROUNDS: self.rounds + 1}
        for name, example in self.config._template:
            rows = []
            for parts in self.parts:
                values = [self.optimizer.state[part][name] for part in parts]
                rows.append(torch.cat(values, dim=-1) if example is None else _stored(values[0]))
            kept[OPTIMIZER + name] = torch.stack(rows) if self.single_rows else rows[0]
        return kept


def _row(tensors: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: value[row] for name, value in tensors.items() if name.startswith(OPTIMIZER)}


def _stored(value: Tensor | float) -> Tensor:
    """A number of the optimiser's state as a tensor of a client state."""
    return value.detach().reshape(1).clone() if isinstance(value, Tensor) else torch.tensor([value])


def _restored(value: Tensor, example: Any) -> Any:
    """The number of the optimiser's state, of the kind of `example`."""
    return value.clone().reshape(example.shape).cpu() if isinstance(example, Tensor) else type(example)(value.item())
