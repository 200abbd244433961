"""The whole cohort as one batched program, for models so small that Python overhead rules.

The weights are one (clients, parameters) matrix. The forward pass is vmapped over its rows, the backward pass is
ordinary autograd, and the algorithm's own functions run on the rows at once. Agrees with `serial` to rounding.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from keel.algorithms.base import Memory, Path
from keel.client import ClientResult, clipped, descend
from keel.engines.base import Problem, RoundWork
from keel.params import FlatModel


class Cohort:
    name = "cohort"

    def __init__(self, problem: Problem):
        self.problem = problem
        self.model = FlatModel(problem.task.module)
        self._losses = vmap(self._loss)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        problem, data = self.problem, self.problem.task.data
        batches = []
        for client in work.cohort:
            held = data.partition[client]
            stream = problem.minibatch_stream(work.ctx.round, client)
            batches.append([held[batch] for batch in problem.work.minibatches(len(held), stream)])
        # Longest first, so that those still at work are always the first rows: no client waits or is padded.
        steps = np.array([len(client_batches) for client_batches in batches])
        order = np.argsort(-steps, kind="stable")
        memory = _stacked([work.memories[i] for i in order])
        column = torch.from_numpy(steps[order]).float()[:, None]
        ctx = replace(work.ctx, steps=column)
        w = work.received["theta"].expand(len(order), -1).clone()
        start, seen = w.clone(), torch.zeros(len(order))
        for step in range(steps.max()):
            active = int((steps > step).sum())
            now = [batches[i][step] for i in order[:active]]
            self._step(w[:active], now, work, {k: v[:active] for k, v in memory.items()}, column[:active], seen)
        message, memory = problem.algorithm.report(Path(start, w), work.received, memory, ctx)
        for row in np.argsort(order):
            yield ClientResult(
                {name: value[row] for name, value in message.items()},
                {name: value[row].clone() for name, value in memory.items()},  # a view would keep all rows alive
                int(column[row]),
                seen[row] / column[row, 0],
            )

    def _step(
        self, w: Tensor, batches: list[np.ndarray], work: RoundWork, memory: Memory, steps: Tensor, seen: Tensor
    ) -> None:
        problem, train = self.problem, self.problem.task.data.train
        indices, shares = _padded(batches)
        inputs, targets = train.inputs[indices], train.targets[indices]

        def gradient(point: Tensor) -> Tensor:
            leaf = point.detach().requires_grad_()
            losses = self._losses(leaf, inputs, targets, shares)
            seen[: len(losses)] += losses.detach()
            (rows,) = torch.autograd.grad(losses.sum(), leaf)
            return clipped(rows, problem.work.clip)

        u = problem.algorithm.direction(w, gradient, work.received, memory, replace(work.ctx, steps=steps))
        descend(w, u, work.ctx.lr, problem.work.weight_decay)

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        outputs = functional_call(self.model.module, self.model.unflatten(weights), (inputs,))
        return (self.problem.task.loss(outputs, targets) * shares).sum()


def _stacked(memories: list[Memory]) -> Memory:
    return {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}


def _padded(batches: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Minibatches as one rectangle of indices, and each example's share in its client's mean (0 for padding)."""
    sizes = np.array([len(batch) for batch in batches])
    real = np.arange(sizes.max()) < sizes[:, None]
    indices = np.empty(real.shape, dtype=np.int64)
    indices[:] = np.array([batch[0] for batch in batches])[:, None]
    indices[real] = np.concatenate(batches)
    shares = real / sizes[:, None]
    return torch.from_numpy(indices), torch.from_numpy(shares.astype(np.float32))
