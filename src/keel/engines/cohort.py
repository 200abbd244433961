"""The whole cohort as one batched program, for models so small that Python overhead rules.

The weights are one (clients, parameters) matrix. The forward pass of plain layers is written for all its rows, that
of other modules is vmapped over them; the backward pass is ordinary autograd, and the algorithm's own functions run on
the rows at once. Agrees with `serial` to rounding.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from keel.algorithms.base import Context, Memory, Message, Path
from keel.client import ClientResult, Seen, clipped, descend
from keel.engines.base import InProcess, Problem, RoundWork
from keel.engines.batched import Forward, batched, is_plain
from keel.errors import KeelError
from keel.params import FlatModel
from keel.task import per_example_cross_entropy

Minibatches = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and each example's share in its client's mean; a row per client."""


class Cohort(InProcess):
    name = "cohort"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.recipe, self.data = problem.recipe, problem.task.data
        self.model, self.moving = FlatModel(problem.task.module), problem.task.moving
        plain = is_plain(self.model.module) and self.recipe.loss is per_example_cross_entropy
        self._losses = self._plain_losses(batched(self.model)) if plain else vmap(self._loss)
        self._try()

    def probe(self, work: RoundWork) -> Iterator[Message]:
        theta = work.received["theta"].expand(len(work.cohort), -1)
        for row in self._full_gradients(theta, work.cohort, work.ctx):
            yield {"gradient": row}

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        algorithm, local = self.recipe.algorithm, self.recipe.work
        batches, choices = [], []
        for client in work.cohort.tolist():
            held = self.data.partition[client]
            own = [held[batch] for batch in self.recipe.minibatches(len(held), work.ctx.round, client)]
            batches.append(own)
            choices.append(self.recipe.choices([len(b) for b in own], "preparation", work.ctx.round, client))
        # Longest first, so that those still at work are always the first rows: no client waits or is padded.
        steps = np.array([len(client_batches) for client_batches in batches])
        order = np.argsort(-steps, kind="stable")
        memory = _stacked([work.memories[i] for i in order])
        column = torch.from_numpy(steps[order]).float()[:, None]
        w = work.received["theta"].expand(len(order), -1).clone()
        start = w.clone()
        full = None
        if "full_gradient" in algorithm.observes:
            full = self._full_gradients(start, work.cohort[order], work.ctx)
        velocity = memory["velocity"].clone() if algorithm.local_momentum else None
        seen = Seen(torch.zeros(len(order)), torch.zeros_like(w) if "mean_gradient" in algorithm.observes else None)
        for step in range(steps.max()):
            active = slice(int((steps > step).sum()))
            rows_at_work = order[active]
            minibatches = self._minibatches(
                [batches[i][step] for i in rows_at_work], [choices[i][step] for i in rows_at_work]
            )
            rows = w[active]
            seen.begin_step(active)

            def gradient(point: Tensor, rows: Tensor = rows, minibatches: Minibatches = minibatches) -> Tensor:
                losses, gradients = self._gradients(point.expand_as(rows), minibatches)
                return seen(losses, clipped(gradients, local.clip))

            mine = {name: value[active] for name, value in memory.items()}
            u = algorithm.direction(rows, gradient, work.received, mine, work.ctx.for_client(column[active]))
            moving = None if velocity is None else velocity[active]
            descend(rows, u, work.ctx.lr, local.weight_decay, moving, algorithm.local_momentum)
        mean = None if seen.gradients is None else seen.gradients / column
        path = Path(start, w, mean_gradient=mean, full_gradient=full, velocity=velocity)
        message, memory = algorithm.report(path, work.received, memory, work.ctx.for_client(column))
        for row in np.argsort(order):
            yield ClientResult(
                _row(message, row),
                {name: value.clone() for name, value in _row(memory, row).items()},  # a view would keep all rows alive
                int(column[row]),
                seen.losses[row] / column[row, 0],
            )

    def _try(self) -> None:
        """Finds out before the first round whether the model can run as one program."""
        rows = self.model.weights.expand(2, -1)
        if self.moving:
            changed = f"a buffer that training changes ({self.moving[0]})"
            raise KeelError(f"engine.name: 'cohort' cannot keep {changed}; accepted: 'serial'")
        try:
            self._gradients(rows, self._minibatches([self.data.partition[0][:1]] * 2, [None] * 2))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise KeelError(
                f"engine.name: 'cohort' cannot run this model as one program ({reason}); accepted: 'serial'"
            ) from error

    def _full_gradients(self, theta: Tensor, cohort: np.ndarray, ctx: Context) -> Tensor:
        """Each client's gradient over all its examples, some examples at a time."""
        held = [self.data.partition[client] for client in cohort.tolist()]
        choices = [
            self.recipe.choices([len(mine)], "full preparation", ctx.round, client)[0]
            for mine, client in zip(held, cohort.tolist(), strict=True)
        ]
        whole = self._minibatches(held, choices)
        total = torch.zeros_like(theta)
        for chunk in zip(*(torch.split(part, self.recipe.chunk, dim=1) for part in whole), strict=True):
            total += self._gradients(theta, chunk)[1]
        return total

    def _minibatches(self, batches: list[np.ndarray], choices: list[np.ndarray | None]) -> Minibatches:
        indices = _padded(batches)
        rows = self.data.train[indices.reshape(-1)]
        drawn = [c for c in choices if c is not None]
        inputs = self.data.prepare(rows.inputs, _padded(drawn).reshape(len(rows), -1) if drawn else None)
        return (
            inputs.view(*indices.shape, *inputs.shape[1:]),
            rows.targets.view(*indices.shape, *rows.targets.shape[1:]),
            _shares(batches),
        )

    def _gradients(self, weights: Tensor, minibatches: Minibatches) -> tuple[Tensor, Tensor]:
        """Each row's loss and gradient."""
        leaf = weights.detach().requires_grad_()
        losses = self._losses(leaf, *minibatches)
        (gradients,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradients

    def _plain_losses(self, forward: Forward) -> Callable[..., Tensor]:
        def losses(weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
            outputs = forward(weights, inputs)
            each = per_example_cross_entropy(outputs.flatten(0, 1), targets.flatten())
            return (each.view_as(shares) * shares).sum(1)

        return losses

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        return (self.recipe.loss(self.model.at(weights, inputs), targets) * shares).sum()


def _row(tensors: Message, row: int) -> Message:
    """One client's part; a tensor without rows (a received one, handed on) is everybody's."""
    return {name: value[row] if value.dim() == 2 else value for name, value in tensors.items()}


def _stacked(memories: list[Memory]) -> Memory:
    return {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of unequal length as one rectangle, each filled up with its first entry."""
    longest = max(len(row) for row in rows)
    rectangle = np.empty((len(rows), longest, *rows[0].shape[1:]), dtype=np.int64)
    rectangle[:] = np.stack([row[0] for row in rows])[:, None]
    rectangle[_real(rows)] = np.concatenate(rows)
    return rectangle


def _shares(batches: list[np.ndarray]) -> Tensor:
    """Each example's share in its client's mean; 0 for what fills up."""
    real = _real(batches)
    return torch.from_numpy((real / real.sum(1, keepdims=True)).astype(np.float32))


def _real(rows: list[np.ndarray]) -> np.ndarray:
    sizes = np.array([len(row) for row in rows])
    return np.arange(sizes.max()) < sizes[:, None]
