"""FedExP, written a second time, with the sums of the paper's formula."""

from tests.algorithms.naive import Layers, Problem, average, grad, local


def fedexp(problem: Problem, epsilon: float) -> Layers:
    x = before = problem.theta0
    for cohort in problem.rounds:
        updates = [
            [a - b for a, b in zip(x, local(problem, client, x, grad), strict=True)] for client in cohort
        ]  # Delta_i
        mean = average(cohort, updates)
        squares = sum(client.weight * squared_norm(update) for client, update in zip(cohort, updates, strict=True))
        eta_g = max(1.0, squares / (2 * (squared_norm(mean) + epsilon)))
        before, x = x, [a - problem.server_lr * eta_g * b for a, b in zip(x, mean, strict=True)]
    return [(a + b) / 2 for a, b in zip(before, x, strict=True)]


def squared_norm(layers: Layers) -> float:
    return sum(float((layer * layer).sum()) for layer in layers)
