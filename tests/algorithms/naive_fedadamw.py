"""A reference implementation of FedAdamW, in the style of naive.py: a layer is a block."""

import torch

from tests.algorithms.naive import Layers, Problem, average, grad, server_step, zeros


def fedadamw(problem: Problem, alpha: float, beta1: float, beta2: float, epsilon: float) -> Layers:
    theta, moved = problem.theta0, zeros(problem.theta0)  # moved: Delta_G times the number of steps
    second, weight = [0.0] * len(theta), 0.0
    for cohort in problem.rounds:
        ends, means, weights = [], [], []
        for client in cohort:
            steps = len(client.batches)
            w, m = [layer.clone() for layer in theta], zeros(theta)
            v = [torch.full_like(layer, mean) for layer, mean in zip(theta, second, strict=True)]
            for k, batch in enumerate(client.batches, start=1):
                g = grad(w, batch)
                m = [beta1 * mk + (1 - beta1) * gk for mk, gk in zip(m, g, strict=True)]
                v = [beta2 * vk + (1 - beta2) * gk**2 for vk, gk in zip(v, g, strict=True)]
                correction = 1 - beta2**k * (1 - weight)
                adam = [
                    (mk / (1 - beta1**k)) / ((vk / correction).sqrt() + epsilon) for mk, vk in zip(m, v, strict=True)
                ]
                w = [
                    wk - client.lr * (ak + alpha * dk / steps + problem.weight_decay * wk)
                    for wk, ak, dk in zip(w, adam, moved, strict=True)
                ]
            ends.append(w)
            means.append([vk.mean() for vk in v])
            weights.append(1 - beta2**steps * (1 - weight))
        second = [float(mean) for mean in average(cohort, means)]
        weight = sum(client.weight * one for client, one in zip(cohort, weights, strict=True))
        moved = [(a - b) / cohort[0].lr for a, b in zip(theta, average(cohort, ends), strict=True)]
        theta = server_step(problem, cohort, theta, ends)
    return theta
