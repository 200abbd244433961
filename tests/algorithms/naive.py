"""A reference implementation of every update rule: lists of per-layer tensors, plain PyTorch, no code of Keel.

A `Problem` is the input of both implementations: the initial layers, the cohort of each round with its minibatches,
and the hyper-parameters. Each function trains for all rounds and returns the server's layers after the last one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Layers = list[Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Client:
    """A client in one round."""

    number: int
    weight: float
    batches: list[Batch]
    lr: float
    """The local learning rate of this round."""


@dataclass(frozen=True)
class Problem:
    theta0: Layers
    rounds: list[list[Client]]
    server_lr: float
    weight_decay: float
    clients: int
    period: float
    examples: dict[int, Batch]
    """The examples of each client."""

    def share(self, client: Client) -> float:
        """The client's share of all examples."""
        return len(self.examples[client.number][1]) / sum(len(labels) for _, labels in self.examples.values())


def forward(layers: Layers, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ layers[0].T + layers[1])
    return hidden @ layers[2].T + layers[3]


def grad(layers: Layers, batch: Batch) -> Layers:
    leaves = [layer.clone().requires_grad_() for layer in layers]
    cross_entropy(forward(leaves, batch[0]), batch[1]).backward()
    return [leaf.grad for leaf in leaves]  # type: ignore[misc]


def zeros(layers: Layers) -> Layers:
    return [torch.zeros_like(layer) for layer in layers]


def local(problem: Problem, client: Client, start: Layers, direction: Callable[[Layers, Batch], Layers]) -> Layers:
    w = [layer.clone() for layer in start]
    for batch in client.batches:
        u = direction(w, batch)
        w = [wk - client.lr * (uk + problem.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
    return w


def average(cohort: list[Client], values: list[Layers]) -> Layers:
    total = zeros(values[0])
    for client, value in zip(cohort, values, strict=True):
        total = [a + client.weight * v for a, v in zip(total, value, strict=True)]
    return total


def fedavg(problem: Problem) -> Layers:
    theta = problem.theta0
    for cohort in problem.rounds:
        ends = [local(problem, client, theta, grad) for client in cohort]
        delta = average(cohort, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - problem.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta


def fedavgm(problem: Problem, beta: float) -> Layers:
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        ends = [local(problem, client, theta, grad) for client in cohort]
        delta = average(cohort, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        m = [beta * a + b for a, b in zip(m, delta, strict=True)]
        theta = [a - problem.server_lr * b for a, b in zip(theta, m, strict=True)]
    return theta


def ghbm(problem: Problem, beta: float, tau: int) -> Layers:
    # theta^{t} for all t; the client step is Eq. (ghb_fl):
    # w - lr g + beta / (tau J) (theta^{t-1} - theta^{t-tau-1})
    thetas = [problem.theta0]
    for t, cohort in enumerate(problem.rounds, start=1):
        theta = thetas[t - 1]
        past = thetas[t - tau - 1] if t - tau - 1 >= 0 else theta
        ends = []
        for client in cohort:
            steps = len(client.batches)
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * gk - client.lr * problem.weight_decay * wk + beta / (tau * steps) * (a - b)
                    for wk, gk, a, b in zip(w, g, theta, past, strict=True)
                ]
            ends.append(w)
        delta = average(cohort, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        thetas.append([a - problem.server_lr * d for a, d in zip(theta, delta, strict=True)])
    return thetas[-1]


def ghbm_lookahead(problem: Problem, beta: float, tau: int, lookahead: float, mu: float) -> Layers:
    # x extrapolates the movement of the last tau rounds: x = theta^{t-1} + lookahead (theta^{t-1} - theta^{t-tau-1})
    thetas = [problem.theta0]
    for t, cohort in enumerate(problem.rounds, start=1):
        theta = thetas[t - 1]
        past = thetas[t - tau - 1] if t - tau - 1 >= 0 else theta
        x = [a + lookahead * (a - b) for a, b in zip(theta, past, strict=True)]
        ends = []
        for client in cohort:
            w = [layer.clone() for layer in x]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * (gk + mu * (wk - xk) + problem.weight_decay * wk)
                    for wk, gk, xk in zip(w, g, x, strict=True)
                ]
            ends.append(w)
        moved = [a - b for a, b in zip(average(cohort, ends), x, strict=True)]
        thetas.append(
            [a + beta * (a - b) / tau + problem.server_lr * c for a, b, c in zip(theta, past, moved, strict=True)]
        )
    return thetas[-1]


def localghbm(problem: Problem, beta: float, tau_i: str) -> Layers:
    theta = problem.theta0
    received: dict[int, tuple[int, Layers]] = {}
    for t, cohort in enumerate(problem.rounds, start=1):
        ends = []
        for client in cohort:
            steps = len(client.batches)
            last, anchor = received.get(client.number, (0, theta))
            tau = problem.period if tau_i == "expected" else t - last
            push = [beta / (tau * steps) * (a - b) for a, b in zip(theta, anchor, strict=True)]
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * (gk + problem.weight_decay * wk) + pk
                    for wk, gk, pk in zip(w, g, push, strict=True)
                ]
            ends.append(w)
            received[client.number] = (t, theta)
        delta = average(cohort, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - problem.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta


def fedhbm(problem: Problem, beta: float, tau_i: str, anchor: str) -> Layers:
    theta = problem.theta0
    sent: dict[int, tuple[int, Layers]] = {}
    for t, cohort in enumerate(problem.rounds, start=1):
        ends = []
        for client in cohort:
            steps = len(client.batches)
            if client.number in sent:
                last, old = sent[client.number]
            elif anchor == "shared_init":
                last, old = 0, problem.theta0
            else:
                last, old = t, None
            tau = problem.period if tau_i == "expected" else t - last
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad(w, batch)
                pull = zeros(w)
                if old is not None:
                    pull = [beta / (tau * steps) * (wk - ok) for wk, ok in zip(w, old, strict=True)]
                w = [
                    wk - client.lr * (gk + problem.weight_decay * wk) + pk
                    for wk, gk, pk in zip(w, g, pull, strict=True)
                ]
            ends.append(w)
            sent[client.number] = (t, w)
        delta = average(cohort, [[a - b for a, b in zip(theta, w, strict=True)] for w in ends])
        theta = [a - problem.server_lr * d for a, d in zip(theta, delta, strict=True)]
    return theta


def fedprox(problem: Problem, mu: float) -> Layers:
    theta = problem.theta0
    for cohort in problem.rounds:
        ends = []
        for client in cohort:
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * (gk + mu * (wk - tk) + problem.weight_decay * wk)
                    for wk, gk, tk in zip(w, g, theta, strict=True)
                ]
            ends.append(w)
        theta = server_step(problem, cohort, theta, ends)
    return theta


def server_step(problem: Problem, cohort: list[Client], theta: Layers, ends: list[Layers]) -> Layers:
    mean_end = average(cohort, ends)
    return [a + problem.server_lr * (b - a) for a, b in zip(theta, mean_end, strict=True)]


def scaffold(problem: Problem, option: int = 2, beta: float = 1.0) -> Layers:
    """With beta below 1: SCAFFOLD-M."""
    theta, c, m = problem.theta0, zeros(problem.theta0), zeros(problem.theta0)
    controls: dict[int, Layers] = {}
    for cohort in problem.rounds:
        ends, changes, directions = [], [], []
        for client in cohort:
            c_i = controls.get(client.number, zeros(theta))
            w, total = [layer.clone() for layer in theta], zeros(theta)
            for batch in client.batches:
                g = grad(w, batch)
                total = [a + b for a, b in zip(total, g, strict=True)]
                u = [beta * (gk - ik + ck) + (1 - beta) * mk for gk, ik, ck, mk in zip(g, c_i, c, m, strict=True)]
                w = [wk - client.lr * (uk + problem.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            new = (
                [a / len(client.batches) for a in total]
                if option == 2
                else grad(theta, problem.examples[client.number])
            )
            ends.append(w)
            changes.append([a - b for a, b in zip(new, c_i, strict=True)])
            steps = len(client.batches)
            directions.append([(a - b) / (client.lr * steps) for a, b in zip(theta, w, strict=True)])
            controls[client.number] = new
        for client, change in zip(cohort, changes, strict=True):  # keeps c the weighted mean of all c_i
            c = [a + problem.share(client) * b for a, b in zip(c, change, strict=True)]
        m = average(cohort, directions)
        theta = server_step(problem, cohort, theta, ends)
    return theta


def feddyn(problem: Problem, alpha: float) -> Layers:
    # Acar et al., Algorithm 1, written with models instead of differences
    theta, h = problem.theta0, zeros(problem.theta0)
    linear: dict[int, Layers] = {}
    for cohort in problem.rounds:
        ends = []
        for client in cohort:
            g_i = linear.get(client.number, zeros(theta))
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * (gk - ik + alpha * (wk - tk) + problem.weight_decay * wk)
                    for wk, gk, ik, tk in zip(w, g, g_i, theta, strict=True)
                ]
            ends.append(w)
            linear[client.number] = [ik - alpha * (wk - tk) for ik, wk, tk in zip(g_i, w, theta, strict=True)]
        mean_end = average(cohort, ends)
        for client, w in zip(cohort, ends, strict=True):
            h = [hk - alpha * problem.share(client) * (wk - tk) for hk, wk, tk in zip(h, w, theta, strict=True)]
        new = [ek - hk / alpha for ek, hk in zip(mean_end, h, strict=True)]
        theta = [tk + problem.server_lr * (nk - tk) for tk, nk in zip(theta, new, strict=True)]
    return theta


def adabest(problem: Problem, mu: float, beta: float) -> Layers:
    theta = average_before = problem.theta0
    biases: dict[int, tuple[int, Layers]] = {}
    for t, cohort in enumerate(problem.rounds, start=1):
        ends = []
        for client in cohort:
            last, h_i = biases.get(client.number, (0, zeros(theta)))
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * (gk - ik + problem.weight_decay * wk) for wk, gk, ik in zip(w, g, h_i, strict=True)
                ]
            ends.append(w)
            new = [ik / (t - last) + mu * (tk - wk) for ik, tk, wk in zip(h_i, theta, w, strict=True)]
            biases[client.number] = (t, new)
        mean_end = average(cohort, ends)
        new_theta = [a - beta * (b - a) for a, b in zip(mean_end, average_before, strict=True)]
        theta = [tk + problem.server_lr * (nk - tk) for tk, nk in zip(theta, new_theta, strict=True)]
        average_before = mean_end
    return theta


def mime(problem: Problem, beta: float = 0.0, fresh: float | None = None) -> Layers:
    """With beta above 0: MimeMom. `fresh`: the weight of the newest gradient, 1 - beta in an average, 1 in a sum."""
    fresh = 1 - beta if fresh is None else fresh
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        c = average(cohort, [grad(theta, problem.examples[client.number]) for client in cohort])
        ends = []
        for client in cohort:
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                at_w, at_theta = grad(w, batch), grad(theta, batch)
                u = [fresh * (a - b + ck) + beta * mk for a, b, ck, mk in zip(at_w, at_theta, c, m, strict=True)]
                w = [wk - client.lr * (uk + problem.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
        theta = server_step(problem, cohort, theta, ends)
        m = [beta * a + fresh * b for a, b in zip(m, c, strict=True)]
    return theta


def mimelitemom(problem: Problem, beta: float, fresh: float | None = None) -> Layers:
    fresh = 1 - beta if fresh is None else fresh
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        full = average(cohort, [grad(theta, problem.examples[client.number]) for client in cohort])
        ends = []
        for client in cohort:
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                u = [fresh * a + beta * b for a, b in zip(grad(w, batch), m, strict=True)]
                w = [wk - client.lr * (uk + problem.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
        theta = server_step(problem, cohort, theta, ends)
        m = [beta * a + fresh * b for a, b in zip(m, full, strict=True)]
    return theta


def fedacg(problem: Problem, lambda_: float, beta: float, length: float) -> Layers:
    """`length` multiplies the lookahead: the server learning rate in Nesterov's form."""
    # Kim et al. write momentum as a movement: theta^t = theta^{t-1} + m^t, m^t = lambda m^{t-1} + mean(w_i - x)
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        x = [a + length * lambda_ * b for a, b in zip(theta, m, strict=True)]
        ends = []
        for client in cohort:
            w = [layer.clone() for layer in x]
            for batch in client.batches:
                g = grad(w, batch)
                w = [
                    wk - client.lr * (gk + beta * (wk - xk) + problem.weight_decay * wk)
                    for wk, gk, xk in zip(w, g, x, strict=True)
                ]
            ends.append(w)
        moved = [a - b for a, b in zip(average(cohort, ends), x, strict=True)]
        m = [lambda_ * a + b for a, b in zip(m, moved, strict=True)]
        theta = [a + problem.server_lr * b for a, b in zip(theta, m, strict=True)]
    return theta


def fedcm(problem: Problem, alpha: float) -> Layers:
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        ends, directions = [], []
        for client in cohort:
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                u = [alpha * a + (1 - alpha) * b for a, b in zip(grad(w, batch), m, strict=True)]
                w = [wk - client.lr * (uk + problem.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
            scale = client.lr * len(client.batches)
            directions.append([(a - b) / scale for a, b in zip(theta, w, strict=True)])
        m = average(cohort, directions)
        theta = server_step(problem, cohort, theta, ends)
    return theta


def fedadc(problem: Problem, beta: float, nesterov: bool) -> Layers:
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        ends = []
        for client in cohort:
            push = [beta * mk / len(client.batches) for mk in m]
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                point = [wk - client.lr * pk for wk, pk in zip(w, push, strict=True)] if nesterov else w
                g = grad(point, batch)
                w = [
                    wk - client.lr * (gk + pk + problem.weight_decay * wk)
                    for wk, gk, pk in zip(w, g, push, strict=True)
                ]
            ends.append(w)
        mean_end = average(cohort, ends)
        m = [(a - b) / cohort[0].lr for a, b in zip(theta, mean_end, strict=True)]
        theta = server_step(problem, cohort, theta, ends)
    return theta


def ghbm_theory(problem: Problem, beta: float, tau: int) -> Layers:
    # Eq. (proto_mom_update_real) in the convex form of the proof: momentum is a moving average of the mean of the
    # last tau pseudo-gradients, each of which is beta times the mean of the gradients of its round.
    theta, m = problem.theta0, zeros(problem.theta0)
    history: list[Layers] = []
    for cohort in problem.rounds:
        pseudo = []
        for client in cohort:
            w, total = [layer.clone() for layer in theta], zeros(theta)
            for batch in client.batches:
                g = grad(w, batch)
                u = [beta * a + (1 - beta) * b for a, b in zip(g, m, strict=True)]
                step = [uk + problem.weight_decay * wk for uk, wk in zip(u, w, strict=True)]
                w = [wk - client.lr * sk for wk, sk in zip(w, step, strict=True)]
                total = [a + sk - (1 - beta) * mk for a, sk, mk in zip(total, step, m, strict=True)]
            pseudo.append([a / len(client.batches) for a in total])
        history.append(average(cohort, pseudo))
        recent = [sum(layer) for layer in zip(*history[-tau:], strict=True)]
        m = [(1 - beta) * a + b / tau for a, b in zip(m, recent, strict=True)]
        theta = [a - problem.server_lr * b for a, b in zip(theta, m, strict=True)]
    return theta


def fedopt(problem: Problem, kind: str, beta1: float, beta2: float, epsilon: float) -> Layers:
    theta, m = problem.theta0, zeros(problem.theta0)
    v = [torch.full_like(layer, epsilon**2) for layer in theta]
    for cohort in problem.rounds:
        ends = [local(problem, client, theta, grad) for client in cohort]
        moved = [b - a for a, b in zip(theta, average(cohort, ends), strict=True)]  # Reddi et al.'s Delta
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, moved, strict=True)]
        if kind == "adam":
            v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, moved, strict=True)]
        elif kind == "yogi":
            v = [a - (1 - beta2) * b * b * (a - b * b).sign() for a, b in zip(v, moved, strict=True)]
        else:
            v = [a + b * b for a, b in zip(v, moved, strict=True)]
        theta = [a + problem.server_lr * b / (c.sqrt() + epsilon) for a, b, c in zip(theta, m, v, strict=True)]
    return theta


def centralized(problem: Problem, momentum: float) -> Layers:
    """SGD with momentum, as in PyTorch, on the minibatches of the only client over all rounds."""
    w, velocity = problem.theta0, zeros(problem.theta0)
    for (client,) in problem.rounds:
        for batch in client.batches:
            g = [gk + problem.weight_decay * wk for gk, wk in zip(grad(w, batch), w, strict=True)]
            velocity = [momentum * vk + gk for vk, gk in zip(velocity, g, strict=True)]
            w = [wk - client.lr * vk for wk, vk in zip(w, velocity, strict=True)]
    return w
