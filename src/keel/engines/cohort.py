"""A whole group of clients as one batched program, for models so small that Python overhead rules.

The weights are one (clients, parameters) matrix. Chains of plain layers are written out for all its rows; the forward
pass of other modules is vmapped over them, with ordinary autograd behind it. The algorithm's own functions run on the
rows at once. Agrees with `serial` to rounding.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

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
"""Clients that are one program at the most, whatever the number of workers."""
GATHERED = 1 << 22
"""Numbers of inputs that are gathered at a time."""
NARROW = 32
"""Examples of a minibatch up to which padding costs less than a program of its own."""


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
        """Where each minibatch begins."""
        return np.cumsum(self.sizes).reshape(self.sizes.shape) - self.sizes


class Cohort(InProcess):
    name = "cohort"
    group = GROUP

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.moving = problem.task.moving
        self.is_chain = is_chain(self.model.module) and self.recipe.loss is per_example_cross_entropy
        self._numbers = prod(self.data.input_shape)
        self._losses = vmap(self._loss)
        self._compiles = problem.compile
        self._programs_of: dict[tuple[torch.Size, ...], Gradients] = {}
        self._try()

    def probe(self, work: RoundWork) -> Iterator[Message]:
        for group in work.groups(self.group):
            theta = work.received["theta"].to(self.device)
            for row in self._full_gradients(theta, group.cohort, work.ctx, len(group.cohort)).to(CPU):
                yield {"gradient": row}

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        work = replace(work, received=moved(work.received, self.device))
        for group in work.groups(self.group):
            results: dict[int, ClientResult] = {}
            for rows in self._programs(group.cohort, self.recipe.work.batch):
                done = self._train(group.of(rows, group.ctx), len(group.cohort))
                results.update(zip(rows, done, strict=True))
            yield from (results[row] for row in range(len(group.cohort)))

    def _programs(self, cohort: np.ndarray, most: int) -> Iterator[list[int]]:
        """Which rows are one program, for minibatches of so many examples at the most.

        In each the longest come first, so that those still at work are always the first rows and no client waits. What
        a minibatch holds of a client is at least half of what it holds of any other, so that little is padding.
        """
        sizes = self.data.partition.sizes_of(cohort)
        left = np.argsort(-sizes, kind="stable")
        while len(left):
            widths = np.minimum(sizes[left], most)
            alike = (2 * widths >= widths[0]) | (widths[0] <= NARROW)
            yield left[alike].tolist()
            left = left[~alike]

    def _train(self, work: RoundWork, most: int) -> list[ClientResult]:
        """The results of clients that come longest first, as one program. Their group has so many at the most."""
        algorithm, local = self.recipe.algorithm, self.recipe.work
        plan = self._plan(work)
        memory = moved(_stacked(work.memories), self.device)
        column = torch.from_numpy(plan.steps).float()[:, None].to(self.device)
        w = work.received["theta"].expand(len(work.cohort), -1).clone()
        start = w.clone()
        full = None
        if "full_gradient" in algorithm.observes:
            full = self._full_gradients(work.received["theta"], work.cohort, work.ctx, most)
        velocity = memory["velocity"].clone() if algorithm.local_momentum else None
        seen = Seen(w.new_zeros(len(w)), torch.zeros_like(w) if "mean_gradient" in algorithm.observes else None)
        gradients_of = self._gradients(most)
        rows, moving, mine, ctx = w, velocity, memory, work.ctx.for_client(column)
        for minibatches in self._minibatches(plan):
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
                steps,
                losses[row],
            )
            for row, steps in enumerate(plan.steps.tolist())
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
            self._derivatives()(rows, *next(self._minibatches(plan)))
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

    def _full_gradients(self, theta: Tensor, cohort: np.ndarray, ctx: Context, most: int) -> Tensor:
        """Each client's gradient over all its examples, some examples at a time."""
        gradients = theta.new_empty(len(cohort), len(theta))
        for rows in self._programs(cohort, self.recipe.chunk):
            gradients[rows] = self._full_gradients_of(theta, cohort[rows], ctx, most)
        return gradients

    def _full_gradients_of(self, theta: Tensor, cohort: np.ndarray, ctx: Context, most: int) -> Tensor:
        """Those of clients that come longest first, as one program."""
        examples, choices, sizes, chunk = [], [], [], self.recipe.chunk
        for client in cohort.tolist():
            examples.append(held := self.data.partition[client])
            choices += self.recipe.choices([len(held)], "full preparation", ctx.round, client)
            sizes.append([min(chunk, len(held) - first) for first in range(0, len(held), chunk)])
        plan = Plan.of(examples, choices, sizes)
        counts = torch.from_numpy(plan.sizes.sum(1, keepdims=True)).to(self.device)
        rows = theta.expand(len(cohort), -1)
        total, gradients_of = torch.zeros_like(rows), self._gradients(most)
        for wide, (inputs, targets, shares) in zip(plan.sizes.max(0), self._minibatches(plan), strict=True):
            active = len(shares)
            if len(rows) > active:  # some are done
                rows = rows[:active]
            of_all = (shares[:, :wide] > 0) / counts[:active]
            total[:active] += gradients_of(rows, inputs[:, :wide], targets[:, :wide], of_all)[1]
        return total

    def _minibatches(self, plan: "Plan") -> Iterator[Minibatches]:
        """Each step's minibatches of the clients that are still at work, gathered for some steps at a time.

        Clients come longest first.
        """
        sizes, starts = plan.sizes.T, plan.starts.T
        at_once = max(1, GATHERED // (sizes.shape[1] * sizes.max() * self._numbers))
        for first in range(0, len(sizes), at_once):
            block = slice(first, first + at_once)
            at_work = sizes[block] > 0
            some = sizes[block][at_work][:, None]
            places = np.arange(some.max())
            real = places < some
            entries = starts[block][at_work][:, None] + np.where(real, places, 0)  # filled up with the first
            shares = torch.from_numpy((real / some).astype(np.float32)).to(self.device)
            parts = (*self._gather(plan, entries), shares)
            rows = at_work.sum(1).tolist()
            yield from zip(*(torch.split(part, rows) for part in parts), strict=True)

    def _gather(self, plan: "Plan", entries: np.ndarray) -> tuple[Tensor, Tensor]:
        flat = entries.reshape(-1)
        rows = self.data.train[plan.examples[flat]]
        inputs = self.data.prepare(rows.inputs, None if plan.choices is None else plan.choices[flat])
        inputs = inputs.contiguous()  # not channels last, in which vmap cannot normalise groups
        return (
            inputs.view(*entries.shape, *inputs.shape[1:]).to(self.device),
            rows.targets.view(*entries.shape, *rows.targets.shape[1:]).to(self.device),
        )

    def _gradients(self, most: int) -> Gradients:
        """A function that gives each row's loss and gradient, of so many rows at the most."""
        if self._compiles:
            return partial(self._by_program, most)
        return self._derivatives()

    def _derivatives(self) -> Gradients:
        return Chain(self.model) if self.is_chain else self._differentiated

    def _by_program(
        self, most: int, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Filled up with zeros to one of a few forms, for each of which the program is compiled once."""
        count, examples = shares.shape
        batch, chunk = self.recipe.work.batch, self.recipe.chunk
        rows, wide = _next(count, most), _next(examples, batch if examples <= batch else chunk)
        whole = [_filled(weights, rows), *(_filled(part, rows, wide) for part in (inputs, targets, shares))]
        form = tuple(part.shape for part in whole)
        if form not in self._programs_of:
            self._programs_of[form] = _compile(self._loss, whole)
        gradients, losses = self._programs_of[form](*whole)
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


def _compile(loss: Callable[..., Tensor], example: list[Any]) -> Gradients:
    """Each row's gradient and loss in machine code, for tensors of this form in one piece each.

    What the compiler makes is kept on disk.
    """
    from torch import _inductor  # takes seconds

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    traced = make_fx(lambda *rows: vmap(grad_and_value(loss))(*rows))(*example)
    for node in traced.graph.nodes:
        node.meta.clear()  # what the tracing knew of the example, which the compiler finds out for itself
    try:
        program: Gradients = _inductor.compile(traced, example, options={"cpp_wrapper": True})
    except RuntimeError as error:
        raise KeelError(f"engine.compile: {str(error).splitlines()[0]}; accepted: false") from error
    return program


def _next(count: int, most: int) -> int:
    """The size of a form for so many: `most`, or one of few below it, less than four times as large as it need be."""
    size = 2
    while size < count:
        size *= 4
    return min(size, most)


def _filled(tensor: Tensor, *sizes: int) -> Tensor:
    """With zeros after its rows (and columns), up to these sizes, and in one piece."""
    if tensor.shape[: len(sizes)] == sizes:
        return tensor.contiguous()
    whole = tensor.new_zeros(*sizes, *tensor.shape[len(sizes) :])
    whole[tuple(map(slice, tensor.shape[: len(sizes)]))] = tensor
    return whole


def _row(tensors: Message, row: int) -> Message:
    """One client's part; a tensor without rows (a received one, handed on) is everybody's."""
    return {name: value[row] if value.dim() == 2 else value for name, value in tensors.items()}


def _stacked(memories: Sequence[Memory]) -> Memory:
    return {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}
