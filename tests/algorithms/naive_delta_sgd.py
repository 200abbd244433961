"""A reference implementation of Delta-SGD, in the style of naive.py."""

from tests.algorithms.naive import Layers, Problem, grad, server_step


def distance(one: Layers, other: Layers) -> float:
    return sum(float(((a - b) ** 2).sum()) for a, b in zip(one, other, strict=True)) ** 0.5


def delta_sgd(problem: Problem, gamma: float, delta: float) -> Layers:
    theta = problem.theta0
    for cohort in problem.rounds:
        ends = []
        for client in cohort:
            w, eta, ratio = [layer.clone() for layer in theta], client.lr, 1.0
            before: tuple[Layers, Layers] | None = None
            for batch in client.batches:
                g = grad(w, batch)
                if before is not None:
                    smooth = gamma * distance(w, before[0]) / (2 * distance(g, before[1]))
                    new = min(smooth, (1 + delta * ratio) ** 0.5 * eta)
                    eta, ratio = new, new / eta
                before = w, g
                w = [wk - eta * gk - client.lr * problem.weight_decay * wk for wk, gk in zip(w, g, strict=True)]
            ends.append(w)
        theta = server_step(problem, cohort, theta, ends)
    return theta
