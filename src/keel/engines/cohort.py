"""A whole group of clients as one batched program, for models so small that Python overhead rules.

The weights are one (clients, parameters) matrix. Chains of plain layers are written out for all its rows; the forward
pass of other modules is vmapped over them, with ordinary autograd behind it. The algorithm's own functions run on the
rows at once. Agrees with `serial` to rounding.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from keel.algorithms.base import Context, Memory, Message
from keel.algorithms.base import Path as LocalPath
from keel.client import ClientResult, Seen, clipped, descend, moved
from keel.engines.base import CPU, InProcess, Problem, RoundWork
from keel.engines.batched import Chain, has_hooks, is_chain
from keel.errors import KeelError
from keel.task import per_example_cross_entropy

Gradients = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Minibatches = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and each example's share in its client's mean; a row per client."""


GROUP = 32
"""Clients that are one program, whatever the number of workers."""
GATHERED = 1 << 22
"""Numbers of inputs that are gathered at a time."""


@dataclass(frozen=True)
class Plan:
    """The minibatches of a round: all examples one after another, and how many each client's each step has."""

    examples: np.ndarray
    choices: np.ndarray | None
    sizes: np.ndarray
    """A row for each client, a column for each step; 0 after a client's last."""

    @classmethod
    def of(cls, examples: list[np.ndarray], choices: list[np.ndarray | None], sizes: list[list[int]]) -> "Plan":
        table = np.zeros((len(sizes), max(map(len, sizes))), dtype=np.int64)
        for row, own in enumerate(sizes):
            table[row, : len(own)] = own
        drawn = [each for each in choices if each is not None]
        return cls(np.concatenate(examples), np.concatenate(drawn) if drawn else None, table)

    @property
    def steps(self) -> np.ndarray:
        return (self.sizes > 0).sum(1)

    @property
    def starts(self) -> np.ndarray:
        """Where each minibatch begins; after a client's last step, anywhere."""
        ends = np.cumsum(self.sizes.reshape(-1)).reshape(self.sizes.shape)
        return np.where(self.sizes > 0, ends - self.sizes, 0)


class Cohort(InProcess):
    name = "cohort"
    group = GROUP

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.moving = problem.task.moving
        self.is_chain = is_chain(self.model.module) and self.recipe.loss is per_example_cross_entropy
        self._numbers = prod(self.data.input_shape)
        self._losses = vmap(self._loss)
        self._compiled = _compile(vmap(grad_and_value(self._loss))) if problem.compile else None
        self._try()

    def probe(self, work: RoundWork) -> Iterator[Message]:
        for group in work.groups(self.group):
            theta = work.received["theta"].to(self.device).expand(len(group.cohort), -1)
            for row in self._full_gradients(theta, group.cohort, work.ctx).to(CPU):
                yield {"gradient": row}

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        work = replace(work, received=moved(work.received, self.device))
        for group in work.groups(self.group):
            yield from self._train(group)

    def _train(self, work: RoundWork) -> list[ClientResult]:
        algorithm, local = self.recipe.algorithm, self.recipe.work
        plan = self._plan(work)
        steps = plan.steps
        # Longest first, so that those still at work are always the first rows: no client waits or is padded.
        order = np.argsort(-steps, kind="stable")
        memory = moved(_stacked([work.memories[i] for i in order]), self.device)
        column = torch.from_numpy(steps[order]).float()[:, None].to(self.device)
        w = work.received["theta"].expand(len(order), -1).clone()
        start = w.clone()
        full = None
        if "full_gradient" in algorithm.observes:
            full = self._full_gradients(start, work.cohort[order], work.ctx)
        velocity = memory["velocity"].clone() if algorithm.local_momentum else None
        seen = Seen(w.new_zeros(len(order)), torch.zeros_like(w) if "mean_gradient" in algorithm.observes else None)
        gradients_of = self._gradients(len(order))
        rows, moving, mine, ctx = w, velocity, memory, work.ctx.for_client(column)
        for minibatches in self._minibatches(plan, order):
            active = slice(len(minibatches[2]))
            if len(rows) > active.stop:  # some are done
                rows, mine = w[active], {name: value[active] for name, value in memory.items()}
                moving, ctx = None if velocity is None else velocity[active], work.ctx.for_client(column[active])
            seen.begin_step(active)

            def gradient(point: Tensor, rows: Tensor = rows, minibatches: Minibatches = minibatches) -> Tensor:
                point = point if point is rows else point.expand_as(rows)
                losses, gradients = gradients_of(point, *minibatches)
                return seen(losses, clipped(gradients, local.clip))

            u = algorithm.direction(rows, gradient, work.received, mine, ctx)
            descend(rows, u, work.ctx.lr, local.weight_decay, moving, algorithm.local_momentum)
        mean = None if seen.gradients is None else seen.gradients / column
        path = LocalPath(start, w, mean_gradient=mean, full_gradient=full, velocity=velocity)
        message, memory = algorithm.report(path, work.received, memory, work.ctx.for_client(column))
        message, memory = moved(message, CPU), moved(memory, CPU)
        losses = (seen.losses / column[:, 0]).to(CPU).unbind()
        return [
            ClientResult(
                _row(message, row),
                {name: value.clone() for name, value in _row(memory, row).items()},  # a view would keep all rows alive
                int(steps[order[row]]),
                losses[row],
            )
            for row in np.argsort(order)
        ]

    def _try(self) -> None:
        """Finds out before the first round whether the model can run as one program."""
        rows = self.model.weights.expand(2, -1)
        if self.moving:
            changed = f"a buffer that training changes ({self.moving[0]})"
            raise KeelError(f"engine.name: 'cohort' cannot keep {changed}; accepted: 'serial'")
        if has_hooks(self.model.module, passes=("backward",)):  # vmap would leave them out
            raise KeelError("engine.name: 'cohort' cannot run backward hooks; accepted: 'serial'")
        plan = Plan(np.repeat(self.data.partition.indices[:1], 2), None, np.ones((2, 1), np.int64))
        try:
            self._gradients(2)(rows, *next(self._minibatches(plan, np.arange(2))))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise KeelError(
                f"engine.name: 'cohort' cannot run this model as one program ({reason}); accepted: 'serial'"
            ) from error

    def _plan(self, work: RoundWork) -> "Plan":
        """Every minibatch of the round."""
        examples, choices, sizes = [], [], []
        for client in work.cohort.tolist():
            held = self.data.partition[client]
            examples.append(held[self.recipe.order(len(held), work.ctx.round, client)])
            sizes.append(self.recipe.work.sizes(len(held)))
            choices += self.recipe.choices([len(examples[-1])], "preparation", work.ctx.round, client)
        return Plan.of(examples, choices, sizes)

    def _full_gradients(self, theta: Tensor, cohort: np.ndarray, ctx: Context) -> Tensor:
        """Each client's gradient over all its examples, some examples at a time."""
        examples, choices = [], []
        for client in cohort.tolist():
            examples.append(self.data.partition[client])
            choices += self.recipe.choices([len(examples[-1])], "full preparation", ctx.round, client)
        plan = Plan.of(examples, choices, [[len(mine)] for mine in examples])
        (whole,) = self._minibatches(plan, np.arange(len(cohort)))
        total, gradients_of = torch.zeros_like(theta), self._gradients(len(cohort))
        for chunk in zip(*(torch.split(part, self.recipe.chunk, dim=1) for part in whole), strict=True):
            total += gradients_of(theta, *chunk)[1]
        return total

    def _minibatches(self, plan: "Plan", order: np.ndarray) -> Iterator[Minibatches]:
        """Each step's minibatches of the clients that are still at work, gathered for some steps at a time."""
        sizes, starts = plan.sizes[order].T, plan.starts[order].T
        active = (sizes > 0).sum(1).tolist()
        places = np.arange(sizes.max())
        at_once = max(1, GATHERED // (len(order) * len(places) * self._numbers))
        for first in range(0, len(sizes), at_once):
            block = slice(first, first + at_once)
            some = sizes[block, : active[first], None]
            real = places < some
            entries = starts[block, : active[first], None] + np.where(real, places, 0)  # filled up with the first
            inputs, targets = self._gather(plan, entries)
            shares = torch.from_numpy((real / np.maximum(1, some)).astype(np.float32)).to(self.device)
            for step, rows in enumerate(active[block]):
                yield inputs[step, :rows], targets[step, :rows], shares[step, :rows]

    def _gather(self, plan: "Plan", entries: np.ndarray) -> tuple[Tensor, Tensor]:
        flat = entries.reshape(-1)
        rows = self.data.train[plan.examples[flat]]
        inputs = self.data.prepare(rows.inputs, None if plan.choices is None else plan.choices[flat])
        inputs = inputs.contiguous()  # not channels last, in which vmap cannot normalise groups
        return (
            inputs.view(*entries.shape, *inputs.shape[1:]).to(self.device),
            rows.targets.view(*entries.shape, *rows.targets.shape[1:]).to(self.device),
        )

    def _gradients(self, rows: int) -> Gradients:
        """A function that gives each row's loss and gradient, for so many rows at the most."""
        if self._compiled is not None:
            return partial(self._by_program, rows)
        return Chain(self.model) if self.is_chain else self._differentiated

    def _by_program(
        self, rows: int, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Filled up with zeros to a few forms, for each of which the program is compiled once."""
        assert self._compiled is not None
        count, examples = shares.shape
        wide = next(most for most in (self.recipe.work.batch, self.recipe.chunk, examples) if most >= examples)
        whole = [_filled(weights, rows), *(_filled(part, rows, wide) for part in (inputs, targets, shares))]
        gradients, losses = self._compiled(*whole)
        return losses[:count], gradients[:count]

    def _differentiated(
        self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        leaf = weights.detach().requires_grad_()
        losses = self._losses(leaf, inputs, targets, shares)
        (gradients,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradients

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        return (self.recipe.loss(self.model.at(weights, inputs), targets) * shares).sum()


def _compile(program: Gradients) -> Gradients:
    """The program in machine code. What the compiler makes is kept on disk for the next run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return torch.compile(program, fullgraph=True, options={"cpp_wrapper": True})


def _filled(tensor: Tensor, *sizes: int) -> Tensor:
    """With zeros after its rows (and columns), up to these sizes."""
    if tensor.shape[: len(sizes)] == sizes:
        return tensor
    whole = tensor.new_zeros(*sizes, *tensor.shape[len(sizes) :])
    whole[tuple(map(slice, tensor.shape[: len(sizes)]))] = tensor
    return whole


def _row(tensors: Message, row: int) -> Message:
    """One client's part; a tensor without rows (a received one, handed on) is everybody's."""
    return {name: value[row] if value.dim() == 2 else value for name, value in tensors.items()}


def _stacked(memories: list[Memory]) -> Memory:
    return {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}
