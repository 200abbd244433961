"""FedSAM and MoFedSAM, written a second time: the perturbed model layer by layer."""

from tests.algorithms.naive import Batch, Layers, Problem, average, grad, local, server_step, zeros


def sharpness_aware(w: Layers, batch: Batch, rho: float) -> Layers:
    g = grad(w, batch)
    length = sum(float((layer * layer).sum()) for layer in g) ** 0.5
    return grad([wk + rho / length * gk for wk, gk in zip(w, g, strict=True)], batch)


def fedsam(problem: Problem, rho: float) -> Layers:
    theta = problem.theta0
    for cohort in problem.rounds:
        ends = [local(problem, client, theta, lambda w, batch: sharpness_aware(w, batch, rho)) for client in cohort]
        theta = server_step(problem, cohort, theta, ends)
    return theta


def mofedsam(problem: Problem, rho: float, beta: float) -> Layers:
    theta, m = problem.theta0, zeros(problem.theta0)
    for cohort in problem.rounds:
        ends, directions = [], []
        for client in cohort:
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                u = [beta * a + (1 - beta) * b for a, b in zip(sharpness_aware(w, batch, rho), m, strict=True)]
                w = [wk - client.lr * (uk + problem.weight_decay * wk) for wk, uk in zip(w, u, strict=True)]
            ends.append(w)
            scale = client.lr * len(client.batches)
            directions.append([(a - b) / scale for a, b in zip(theta, w, strict=True)])
        m = average(cohort, directions)
        theta = server_step(problem, cohort, theta, ends)
    return theta
