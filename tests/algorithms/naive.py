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
    lr: float
    """The local rate of this round."""


@dataclass(frozen=True)
class World:
    theta0: Layers
    rounds: list[list[Turn]]
    server_lr: float
    weight_decay: float
    clients: int
    period: float
    examples: dict[int, Batch]
    """All that each client holds."""

    def share(self, client: int) -> float:
        """How much of all examples a client holds."""
        return len(self.examples[client][1]) / sum(len(labels) for _, labels in self.examples.values())


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
        w = [wk - turn.lr * (uk + world.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
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
                    wk - turn.lr * gk - turn.lr * world.weight_decay * wk + beta / (tau * steps) * (a - b)
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
                w = [wk - turn.lr * (gk + world.weight_decay * wk) + pk for wk, gk, pk in zip(w, g, push, strict=True)]
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
                w = [wk - turn.lr * (gk + world.weight_decay * wk) + pk for wk, gk, pk in zip(w, g, pull, strict=True)]
            ends.append(w)
            sent[turn.client] = (t, w)
        delta = average(turns, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - world.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta


def fedprox(world: World, mu: float) -> Layers:
    theta = world.theta0
    for turns in world.rounds:
        ends = []
        for turn in turns:
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                g = grad(w, batch)
                w = [
                    wk - turn.lr * (gk + mu * (wk - tk) + world.weight_decay * wk)
                    for wk, gk, tk in zip(w, g, theta, strict=True)
                ]
            ends.append(w)
        theta = server_step(world, turns, theta, ends)
    return theta


def server_step(world: World, turns: list[Turn], theta: Layers, ends: list[Layers]) -> Layers:
    mean_end = average(turns, ends)
    return [a + world.server_lr * (b - a) for a, b in zip(theta, mean_end, strict=True)]


def everything(turn: Turn, world: World) -> Batch:
    return world.examples[turn.client]


def scaffold(world: World, option: int = 2, beta: float = 1.0) -> Layers:
    """With beta below 1: SCAFFOLD-M."""
    theta, c, m = world.theta0, zeros(world.theta0), zeros(world.theta0)
    controls: dict[int, Layers] = {}
    for turns in world.rounds:
        ends, changes, directions = [], [], []
        for turn in turns:
            mine = controls.get(turn.client, zeros(theta))
            w, total = [layer.clone() for layer in theta], zeros(theta)
            for batch in turn.batches:
                g = grad(w, batch)
                total = [a + b for a, b in zip(total, g, strict=True)]
                u = [beta * (gk - ik + ck) + (1 - beta) * mk for gk, ik, ck, mk in zip(g, mine, c, m, strict=True)]
                w = [wk - turn.lr * (uk + world.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            new = [a / len(turn.batches) for a in total] if option == 2 else grad(theta, everything(turn, world))
            ends.append(w)
            changes.append([a - b for a, b in zip(new, mine, strict=True)])
            steps = len(turn.batches)
            directions.append([(a - b) / (turn.lr * steps) for a, b in zip(theta, w, strict=True)])
            controls[turn.client] = new
        for turn, change in zip(turns, changes, strict=True):  # so that c is the mean of all c_i, by their examples
            c = [a + world.share(turn.client) * b for a, b in zip(c, change, strict=True)]
        m = average(turns, directions)
        theta = server_step(world, turns, theta, ends)
    return theta


def feddyn(world: World, alpha: float) -> Layers:
    # Acar et al., Algorithm 1, in the models' own terms
    theta, h = world.theta0, zeros(world.theta0)
    linear: dict[int, Layers] = {}
    for turns in world.rounds:
        ends = []
        for turn in turns:
            mine = linear.get(turn.client, zeros(theta))
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                g = grad(w, batch)
                w = [
                    wk - turn.lr * (gk - ik + alpha * (wk - tk) + world.weight_decay * wk)
                    for wk, gk, ik, tk in zip(w, g, mine, theta, strict=True)
                ]
            ends.append(w)
            linear[turn.client] = [ik - alpha * (wk - tk) for ik, wk, tk in zip(mine, w, theta, strict=True)]
        mean_end = average(turns, ends)
        for turn, w in zip(turns, ends, strict=True):
            h = [hk - alpha * world.share(turn.client) * (wk - tk) for hk, wk, tk in zip(h, w, theta, strict=True)]
        new = [ek - hk / alpha for ek, hk in zip(mean_end, h, strict=True)]
        theta = [tk + world.server_lr * (nk - tk) for tk, nk in zip(theta, new, strict=True)]
    return theta


def adabest(world: World, mu: float, beta: float) -> Layers:
    theta = average_before = world.theta0
    biases: dict[int, tuple[int, Layers]] = {}
    for t, turns in enumerate(world.rounds, start=1):
        ends = []
        for turn in turns:
            last, mine = biases.get(turn.client, (0, zeros(theta)))
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                g = grad(w, batch)
                w = [wk - turn.lr * (gk - ik + world.weight_decay * wk) for wk, gk, ik in zip(w, g, mine, strict=True)]
            ends.append(w)
            new = [ik / (t - last) + mu * (tk - wk) for ik, tk, wk in zip(mine, theta, w, strict=True)]
            biases[turn.client] = (t, new)
        mean_end = average(turns, ends)
        new_theta = [a - beta * (b - a) for a, b in zip(mean_end, average_before, strict=True)]
        theta = [tk + world.server_lr * (nk - tk) for tk, nk in zip(theta, new_theta, strict=True)]
        average_before = mean_end
    return theta


def mime(world: World, beta: float = 0.0) -> Layers:
    """With beta above 0: MimeMom."""
    theta, m = world.theta0, zeros(world.theta0)
    for turns in world.rounds:
        c = average(turns, [grad(theta, everything(turn, world)) for turn in turns])
        ends = []
        for turn in turns:
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                here, there = grad(w, batch), grad(theta, batch)
                u = [(1 - beta) * (a - b + ck) + beta * mk for a, b, ck, mk in zip(here, there, c, m, strict=True)]
                w = [wk - turn.lr * (uk + world.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
        theta = server_step(world, turns, theta, ends)
        m = [beta * a + (1 - beta) * b for a, b in zip(m, c, strict=True)]
    return theta


def mimelitemom(world: World, beta: float) -> Layers:
    theta, m = world.theta0, zeros(world.theta0)
    for turns in world.rounds:
        full = average(turns, [grad(theta, everything(turn, world)) for turn in turns])
        ends = []
        for turn in turns:
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                u = [(1 - beta) * a + beta * b for a, b in zip(grad(w, batch), m, strict=True)]
                w = [wk - turn.lr * (uk + world.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
        theta = server_step(world, turns, theta, ends)
        m = [beta * a + (1 - beta) * b for a, b in zip(m, full, strict=True)]
    return theta


def fedacg(world: World, lambda_: float, beta: float) -> Layers:
    # Kim et al. write momentum as a movement: theta^t = theta^{t-1} + m^t, m^t = lambda m^{t-1} + mean(w_i - x)
    theta, m = world.theta0, zeros(world.theta0)
    for turns in world.rounds:
        x = [a + lambda_ * b for a, b in zip(theta, m, strict=True)]
        ends = []
        for turn in turns:
            w = [layer.clone() for layer in x]
            for batch in turn.batches:
                g = grad(w, batch)
                w = [
                    wk - turn.lr * (gk + beta * (wk - xk) + world.weight_decay * wk)
                    for wk, gk, xk in zip(w, g, x, strict=True)
                ]
            ends.append(w)
        moved = [a - b for a, b in zip(average(turns, ends), x, strict=True)]
        m = [lambda_ * a + b for a, b in zip(m, moved, strict=True)]
        theta = [a + world.server_lr * b for a, b in zip(theta, m, strict=True)]
    return theta


def fedcm(world: World, alpha: float) -> Layers:
    theta, m = world.theta0, zeros(world.theta0)
    for turns in world.rounds:
        ends, directions = [], []
        for turn in turns:
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                u = [alpha * a + (1 - alpha) * b for a, b in zip(grad(w, batch), m, strict=True)]
                w = [wk - turn.lr * (uk + world.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
            scale = turn.lr * len(turn.batches)
            directions.append([(a - b) / scale for a, b in zip(theta, w, strict=True)])
        m = average(turns, directions)
        theta = server_step(world, turns, theta, ends)
    return theta


def fedadc(world: World, beta: float, nesterov: bool) -> Layers:
    theta, m = world.theta0, zeros(world.theta0)
    for turns in world.rounds:
        ends = []
        for turn in turns:
            push = [beta * mk / len(turn.batches) for mk in m]
            w = [layer.clone() for layer in theta]
            for batch in turn.batches:
                point = [wk - turn.lr * pk for wk, pk in zip(w, push, strict=True)] if nesterov else w
                g = grad(point, batch)
                w = [wk - turn.lr * (gk + pk + world.weight_decay * wk) for wk, gk, pk in zip(w, g, push, strict=True)]
            ends.append(w)
        mean_end = average(turns, ends)
        m = [(a - b) / turns[0].lr for a, b in zip(theta, mean_end, strict=True)]
        theta = server_step(world, turns, theta, ends)
    return theta


def ghbm_theory(world: World, beta: float, tau: int) -> Layers:
    # Eq. (proto_mom_update_real) in the convex form of the proof: momentum is a moving average of the mean of the
    # last tau pseudo-gradients, each of which is beta times the mean of the gradients that were seen.
    theta, m = world.theta0, zeros(world.theta0)
    seen: list[Layers] = []
    for turns in world.rounds:
        pseudo = []
        for turn in turns:
            w, total = [layer.clone() for layer in theta], zeros(theta)
            for batch in turn.batches:
                g = grad(w, batch)
                u = [beta * a + (1 - beta) * b for a, b in zip(g, m, strict=True)]
                step = [uk + world.weight_decay * wk for uk, wk in zip(u, w, strict=True)]
                w = [wk - turn.lr * sk for wk, sk in zip(w, step, strict=True)]
                total = [a + sk - (1 - beta) * mk for a, sk, mk in zip(total, step, m, strict=True)]
            pseudo.append([a / len(turn.batches) for a in total])
        seen.append(average(turns, pseudo))
        recent = [sum(layer) for layer in zip(*seen[-tau:], strict=True)]
        m = [(1 - beta) * a + b / tau for a, b in zip(m, recent, strict=True)]
        theta = [a - world.server_lr * b for a, b in zip(theta, m, strict=True)]
    return theta


def fedopt(world: World, kind: str, beta1: float, beta2: float, epsilon: float) -> Layers:
    theta, m = world.theta0, zeros(world.theta0)
    v = [torch.full_like(layer, epsilon**2) for layer in theta]
    for turns in world.rounds:
        ends = [local(world, turn, theta, grad) for turn in turns]
        moved = [b - a for a, b in zip(theta, average(turns, ends), strict=True)]  # Reddi et al.'s Delta
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, moved, strict=True)]
        if kind == "adam":
            v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, moved, strict=True)]
        elif kind == "yogi":
            v = [a - (1 - beta2) * b * b * (a - b * b).sign() for a, b in zip(v, moved, strict=True)]
        else:
            v = [a + b * b for a, b in zip(v, moved, strict=True)]
        theta = [a + world.server_lr * b / (c.sqrt() + epsilon) for a, b, c in zip(theta, m, v, strict=True)]
    return theta


def centralized(world: World, momentum: float) -> Layers:
    """PyTorch's own SGD on the minibatches of the one client, over all rounds."""
    leaves = [layer.clone().requires_grad_() for layer in world.theta0]
    sgd = torch.optim.SGD(leaves, lr=1.0, momentum=momentum, weight_decay=world.weight_decay)
    for (turn,) in world.rounds:
        sgd.param_groups[0]["lr"] = turn.lr
        for batch in turn.batches:
            sgd.zero_grad()
            cross_entropy(forward(leaves, batch[0]), batch[1]).backward()
            sgd.step()
    return [leaf.detach() for leaf in leaves]
