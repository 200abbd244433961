"""What a client does in a round: the one function that every engine calls, whatever it runs on."""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, ClientContext, Memory, Message, Path
from keel.data.federated import Examples
from keel.params import FlatModel, Loss


@dataclass(frozen=True)
class LocalWork:
    """How much a client does in a round, and how it steps."""

    epochs: int | None
    steps: int | None
    batch: int
    drop_last: bool
    weight_decay: float
    clip: float | None

    def count(self, examples: int) -> int:
        """J, the local steps of a client with so many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * self._batches(examples)

    def minibatches(self, examples: int, stream: np.random.Generator) -> list[np.ndarray]:
        """The examples of each step: epochs in a new order each, cut into batches."""
        per_epoch = self._batches(examples)
        batches: list[np.ndarray] = []
        for _ in range(ceil(self.count(examples) / per_epoch)):
            order = stream.permutation(examples)
            batches += [order[start : start + self.batch] for start in range(0, per_epoch * self.batch, self.batch)]
        return batches[: self.count(examples)]

    def _batches(self, examples: int) -> int:
        """Minibatches of an epoch; a client with less than one batch still has one."""
        return max(1, examples // self.batch) if self.drop_last else ceil(examples / self.batch)


@dataclass(frozen=True)
class ClientResult:
    """What a client's round gave: what it sends, what it keeps, and the loss it saw (which does not travel)."""

    message: Message
    memory: Memory
    steps: int
    loss: Tensor


def train_client(
    algorithm: Algorithm,
    model: FlatModel,
    loss: Loss,
    examples: Examples,
    received: Message,
    memory: Memory,
    ctx: ClientContext,
    work: LocalWork,
    stream: np.random.Generator,
) -> ClientResult:
    """One client's round. `model` is a place to compute in; its weights are overwritten."""
    steps = work.count(len(examples))
    ctx = replace(ctx, steps=steps)
    w = model.weights
    w.copy_(received["theta"])
    start = w.clone()
    seen = torch.zeros(())
    for indices in work.minibatches(len(examples), stream):
        minibatch = examples[indices]

        def gradient(point: Tensor, minibatch: Examples = minibatch) -> Tensor:
            assert point is w, "gradients elsewhere than at the local model are not asked for yet"
            value = loss(model.module(minibatch.inputs), minibatch.targets).mean()
            seen.add_(value.detach())
            return clipped(model.gradient(value), work.clip)

        u = algorithm.direction(w, gradient, received, memory, ctx)
        descend(w, u, ctx.lr, work.weight_decay)
    message, memory = algorithm.report(Path(start, w.clone()), received, memory, ctx)
    return ClientResult(message, memory, steps, seen / steps)


def descend(w: Tensor, u: Tensor, lr: float, weight_decay: float) -> None:
    """w <- w - lr (u + weight_decay w), in place."""
    if weight_decay:
        w.mul_(1 - lr * weight_decay)
    w.sub_(u, alpha=lr)


def clipped(gradient: Tensor, limit: float | None) -> Tensor:
    """Each row (or the one vector) scaled down, in place, to a norm of at most `limit`."""
    if limit is not None:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient.mul_((limit / norm).clamp_(max=1.0))
    return gradient
