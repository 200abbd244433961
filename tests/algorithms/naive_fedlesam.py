"""A reference implementation of FedLESAM, in the style of naive.py."""

from tests.algorithms.naive import Layers, Problem, grad, server_step


def fedlesam(problem: Problem, rho: float) -> Layers:
    theta = problem.theta0
    received: dict[int, Layers] = {}
    for cohort in problem.rounds:
        ends = []
        for client in cohort:
            old = received.get(client.number, theta)
            offset = [a - b for a, b in zip(old, theta, strict=True)]
            norm = sum(float((layer**2).sum()) for layer in offset) ** 0.5
            delta = [rho * layer / norm if norm else layer for layer in offset]
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g = grad([wk + dk for wk, dk in zip(w, delta, strict=True)], batch)
                w = [wk - client.lr * (gk + problem.weight_decay * wk) for wk, gk in zip(w, g, strict=True)]
            ends.append(w)
            received[client.number] = theta
        theta = server_step(problem, cohort, theta, ends)
    return theta
