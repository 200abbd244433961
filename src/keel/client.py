"""What a client does in a round, whatever it runs on: the function that the engines call for each client.

The cohort engine runs the same steps for all clients at once, from the same parts.
"""

from dataclasses import dataclass, field
from math import ceil
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, Context, Memory, Message, Path
from keel.data.federated import Examples, Held
from keel.data.preparation import AsStored, Preparation
from keel.params import FlatModel, Loss
from keel.randomness import draws, rewind, torch_draws


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

    def order(self, examples: int, stream: np.random.Generator) -> np.ndarray:
        """The examples of all steps, one after another: epochs in a new order each."""
        sizes = self.sizes(examples)
        epochs = ceil(len(sizes) / self._batches(examples))
        used = sum(sizes[: self._batches(examples)])
        return np.concatenate([stream.permutation(examples)[:used] for _ in range(epochs)])[: sum(sizes)]

    def minibatches(self, examples: int, stream: np.random.Generator) -> list[np.ndarray]:
        """The examples of each step."""
        return np.split(self.order(examples, stream), np.cumsum(self.sizes(examples))[:-1])

    def sizes(self, examples: int) -> list[int]:
        """How many examples each step has."""
        per_epoch = self._batches(examples)
        epoch = [self.batch] * (per_epoch - 1) + [min(self.batch, examples - (per_epoch - 1) * self.batch)]
        steps = self.count(examples)
        return (epoch * ceil(steps / per_epoch))[:steps]

    def _batches(self, examples: int) -> int:
        """Minibatches of an epoch; a client with less than one batch still has one."""
        return max(1, examples // self.batch) if self.drop_last else ceil(examples / self.batch)


@dataclass(frozen=True)
class Recipe:
    """What every client of a run does in every round."""

    algorithm: Algorithm
    loss: Loss
    work: LocalWork
    seed: int
    prepare: Preparation = field(default_factory=AsStored)
    chunk: int = 512  # examples of a full gradient that are computed at a time

    def minibatches(self, examples: int, round: int, client: int) -> list[np.ndarray]:
        return self.work.minibatches(examples, draws(self.seed, "minibatches", round, client))

    def order(self, examples: int, round: int, client: int) -> np.ndarray:
        """The examples of all steps, one after another."""
        return self.work.order(examples, draws(self.seed, "minibatches", round, client))

    def choices(self, examples: list[int], purpose: str, round: int, client: int) -> list[np.ndarray | None]:
        """What chance does to the examples of each minibatch, from their numbers."""
        if not self.prepare.random:
            return [None] * len(examples)
        drawn = self.prepare.draw(sum(examples), draws(self.seed, purpose, round, client))
        if drawn is None:
            return [None] * len(examples)
        return [*np.split(drawn, np.cumsum(examples)[:-1])]


@dataclass(frozen=True)
class ClientResult:
    """What a client's round gave: what it sends, what it keeps, and the loss it saw (which does not travel).

    Whether the model's `buffers` are sent or kept is not the client's to say.
    """

    message: Message
    memory: Memory
    steps: int
    loss: Tensor
    buffers: Tensor | None = None

    def to(self, device: torch.device) -> "ClientResult":
        buffers = None if self.buffers is None else self.buffers.to(device)
        message, memory = moved(self.message, device), moved(self.memory, device)
        return ClientResult(message, memory, self.steps, self.loss.to(device), buffers)


def moved(tensors: Message, device: torch.device) -> Message:
    return {name: value.to(device) for name, value in tensors.items()}


class Seen:
    """Adds up the losses and, if asked for, the gradients along a path: those of each step's first gradient.

    Where a cohort runs as one program they have a row per client, and a step is one of the `active` rows.
    """

    def __init__(self, losses: Tensor, gradients: Tensor | None):
        self.losses, self.gradients = losses, gradients

    def begin_step(self, active: slice | EllipsisType = ...) -> None:
        self.active, self.new = active, True

    def __call__(self, losses: Tensor, gradients: Tensor) -> Tensor:
        if self.new:
            self.losses[self.active].add_(losses)
            if self.gradients is not None:
                self.gradients[self.active].add_(gradients)
            self.new = False
        return gradients


def train_client(
    recipe: Recipe,
    model: FlatModel,
    client: int,
    examples: Held,
    received: Message,
    memory: Memory,
    round_ctx: Context,
    buffers: Tensor | None = None,
) -> ClientResult:
    """One client's round. `model` is a place to compute in; its weights are overwritten."""
    algorithm, loss, work = recipe.algorithm, recipe.loss, recipe.work
    minibatches = recipe.minibatches(len(examples), round_ctx.round, client)
    steps = len(minibatches)
    ctx = round_ctx.for_client(steps)
    w = model.weights
    w.copy_(received["theta"])
    start = w.clone()
    model.set_buffers(buffers)
    with torch_draws(recipe.seed, "full", ctx.round, client):
        full = full_gradient(recipe, model, client, examples, ctx) if "full_gradient" in algorithm.observes else None
    model.set_buffers(buffers)  # again: a pass for a gradient may have changed them
    velocity = memory["velocity"].clone() if algorithm.local_momentum else None
    seen = Seen(w.new_zeros(()), torch.zeros_like(w) if "mean_gradient" in algorithm.observes else None)

    def step(number: int, minibatch: Examples, choices: np.ndarray | None) -> None:
        inputs, targets = recipe.prepare(minibatch.inputs, choices).to(w.device), minibatch.targets.to(w.device)
        seen.begin_step()

        def gradient(point: Tensor) -> Tensor:
            rewind(recipe.seed, "local", ctx.round, client, number)  # a second gradient has the same dropout
            if point is w:
                value = loss(model.module(inputs), targets).mean()
                result = model.gradient(value)
            else:
                leaf = point.detach().requires_grad_()
                value = loss(model.at(leaf, inputs), targets).mean()
                (result,) = torch.autograd.grad(value, leaf)
            return seen(value.detach(), clipped(result, work.clip))

        u = algorithm.direction(w, gradient, received, memory, ctx)
        descend(w, u, ctx.lr, work.weight_decay, velocity, algorithm.local_momentum)

    with torch_draws(recipe.seed, "local", ctx.round, client):
        choices = recipe.choices([len(indices) for indices in minibatches], "preparation", ctx.round, client)
        for number, (indices, chosen) in enumerate(zip(minibatches, choices, strict=True)):
            step(number, examples[indices], chosen)
    mean = None if seen.gradients is None else seen.gradients.div_(steps)
    path = Path(start, w.clone(), mean_gradient=mean, full_gradient=full, velocity=velocity)
    message, memory = algorithm.report(path, received, memory, ctx)
    return ClientResult(message, memory, steps, seen.losses / steps, model.buffers())


def probe_client(
    recipe: Recipe,
    model: FlatModel,
    client: int,
    examples: Held,
    received: Message,
    ctx: Context,
    buffers: Tensor | None = None,
) -> Message:
    """The first phase of a round, for algorithms that have one: the full gradient at the server's model."""
    with torch_draws(recipe.seed, "probe", ctx.round, client):
        model.weights.copy_(received["theta"])
        model.set_buffers(buffers)
        return {"gradient": full_gradient(recipe, model, client, examples, ctx)}


def full_gradient(recipe: Recipe, model: FlatModel, client: int, examples: Held, ctx: Context) -> Tensor:
    """The gradient of the mean loss over all examples at the model's weights, some examples at a time.

    The examples are prepared as for training: its mean is what the minibatches' gradients are about.
    """
    total = torch.zeros_like(model.weights)
    parts = [np.arange(i, min(i + recipe.chunk, len(examples))) for i in range(0, len(examples), recipe.chunk)]
    choices = recipe.choices([len(part) for part in parts], "full preparation", ctx.round, client)
    for part, chosen in zip(parts, choices, strict=True):
        some = examples[part]
        inputs, targets = recipe.prepare(some.inputs, chosen).to(total.device), some.targets.to(total.device)
        losses = recipe.loss(model.module(inputs), targets)
        total.add_(model.gradient(losses.sum() / len(examples)))
    return total


def descend(
    w: Tensor, u: Tensor, lr: float, weight_decay: float, velocity: Tensor | None = None, momentum: float = 0.0
) -> None:
    """w <- w - lr (u + weight_decay w), in place; with a velocity v, w <- w - lr v for v <- momentum v + the same."""
    if velocity is not None:
        velocity.mul_(momentum).add_(u).add_(w, alpha=weight_decay)
        w.sub_(velocity, alpha=lr)
        return
    if weight_decay:
        w.mul_(1 - lr * weight_decay)
    w.sub_(u, alpha=lr)


def clipped(gradient: Tensor, limit: float | None) -> Tensor:
    """Each row (or the one vector) scaled down, in place, to a norm of at most `limit`."""
    if limit is not None:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient.mul_((limit / norm).clamp_(max=1.0))
    return gradient
