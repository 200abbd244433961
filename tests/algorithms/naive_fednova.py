"""FedNova, written a second time: the weight of each step's gradient in the local update, step by step."""

from tests.algorithms.naive import Layers, Problem, grad, zeros


def fednova(problem: Problem, momentum: float = 0.0) -> Layers:
    theta = problem.theta0
    for cohort in problem.rounds:
        normalised, norms = [], []
        for client in cohort:
            w, velocity = theta, zeros(theta)
            for batch in client.batches:
                g = [gk + problem.weight_decay * wk for gk, wk in zip(grad(w, batch), w, strict=True)]
                velocity = [momentum * vk + gk for vk, gk in zip(velocity, g, strict=True)]
                w = [wk - client.lr * vk for wk, vk in zip(w, velocity, strict=True)]
            steps = len(client.batches)
            weights = [sum(momentum ** (later - step) for later in range(step, steps)) for step in range(steps)]  # a_i
            norms.append(sum(weights))
            normalised.append([(a - b) / (client.lr * norms[-1]) for a, b in zip(theta, w, strict=True)])  # d_i
        tau_eff = sum(client.weight * norm for client, norm in zip(cohort, norms, strict=True))
        for client, d in zip(cohort, normalised, strict=True):
            scale = problem.server_lr * tau_eff * client.weight * client.lr
            theta = [a - scale * b for a, b in zip(theta, d, strict=True)]
    return theta
