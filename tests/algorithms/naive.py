"""Every update rule a second time, naively: lists of per-layer tensors, plain PyTorch, no code shared with Keel.

A `World` is what both sides are given: the initial layers, who takes part in each round with which minibatches,
and the numbers of the setting. Each function plays all rounds and returns the server's layers after the last.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Layers = list[Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Turn:
    """One client's part in a round."""

    client: int
    weight: float
    batches: list[Batch]


@dataclass(frozen=True)
class World:
    theta0: Layers
    rounds: list[list[Turn]]
    lr: float
    server_lr: float
    weight_decay: float
    clients: int
    period: float


def forward(layers: Layers, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ layers[0].T + layers[1])
    return hidden @ layers[2].T + layers[3]


def grad(layers: Layers, batch: Batch) -> Layers:
    leaves = [layer.clone().requires_grad_() for layer in layers]
    cross_entropy(forward(leaves, batch[0]), batch[1]).backward()
    return [leaf.grad for leaf in leaves]  # type: ignore[misc]


def zeros(layers: Layers) -> Layers:
    return [torch.zeros_like(layer) for layer in layers]


def local(world: World, turn: Turn, start: Layers, direction: Callable[[Layers, Batch], Layers]) -> Layers:
    w = [layer.clone() for layer in start]
    for batch in turn.batches:
        u = direction(w, batch)
        w = [wk - world.lr * (uk + world.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
    return w


def average(turns: list[Turn], values: list[Layers]) -> Layers:
    total = zeros(values[0])
    for turn, value in zip(turns, values, strict=True):
        total = [a + turn.weight * v for a, v in zip(total, value, strict=True)]
    return total


def fedavg(world: World) -> Layers:
    theta = world.theta0
    for turns in world.rounds:
        ends = [local(world, turn, theta, grad) for turn in turns]
        delta = average(turns, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - world.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta


def fedavgm(world: World, beta: float) -> Layers:
    theta, m = world.theta0, zeros(world.theta0)
    for turns in world.rounds:
        ends = [local(world, turn, theta, grad) for turn in turns]
        delta = average(turns, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        m = [beta * a + b for a, b in zip(m, delta, strict=True)]
        theta = [a - world.server_lr * b for a, b in zip(theta, m, strict=True)]
    return theta


def ghbm(world: World, beta: float, tau: int) -> Layers:
    # theta^{t} for all t; the client step is Eq. (ghb_fl):
    # w - lr g + beta / (tau J) (theta^{t-1} - theta^{t-tau-1})
    thetas = [world.theta0]
    for t, turns in enumerate(world.rounds, start=1):
        theta = thetas[t - 1]
        past = thetas[t - tau - 1] if t - tau - 1 >= 0 else theta
        ends = []
        for turn in turns:
            steps = len(turn.batches)
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                g = grad(w, batch)
                w = [
                    wk - world.lr * gk - world.lr * world.weight_decay * wk + beta / (tau * steps) * (a - b)
                    for wk, gk, a, b in zip(w, g, theta, past, strict=True)
                ]
            ends.append(w)
        delta = average(turns, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        thetas.append([a - world.server_lr * d for a, d in zip(theta, delta, strict=True)])
    return thetas[-1]


def localghbm(world: World, beta: float, tau_i: str) -> Layers:
    theta = world.theta0
    received: dict[int, tuple[int, Layers]] = {}
    for t, turns in enumerate(world.rounds, start=1):
        ends = []
        for turn in turns:
            steps = len(turn.batches)
            last, anchor = received.get(turn.client, (0, theta))
            tau = world.period if tau_i == "expected" else t - last
            push = [beta / (tau * steps) * (a - b) for a, b in zip(theta, anchor, strict=True)]
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                g = grad(w, batch)
                w = [wk - world.lr * (gk + world.weight_decay * wk) + pk for wk, gk, pk in zip(w, g, push, strict=True)]
            ends.append(w)
            received[turn.client] = (t, theta)
        delta = average(turns, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - world.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta


def fedhbm(world: World, beta: float, tau_i: str, anchor: str) -> Layers:
    theta = world.theta0
    sent: dict[int, tuple[int, Layers]] = {}
    for t, turns in enumerate(world.rounds, start=1):
        ends = []
        for turn in turns:
            steps = len(turn.batches)
            if turn.client in sent:
                last, old = sent[turn.client]
            elif anchor == "shared_init":
                last, old = 0, world.theta0
            else:
                last, old = t, None
            tau = world.period if tau_i == "expected" else t - last
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                g = grad(w, batch)
                pull = zeros(w)
                if old is not None:
                    pull = [beta / (tau * steps) * (wk - ok) for wk, ok in zip(w, old, strict=True)]
                w = [wk - world.lr * (gk + world.weight_decay * wk) + pk for wk, gk, pk in zip(w, g, pull, strict=True)]
            ends.append(w)
            sent[turn.client] = (t, w)
        delta = average(turns, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - world.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta
