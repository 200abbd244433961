"""A reference implementation of FedSpeed, in the style of naive.py, with models instead of updates."""

from tests.algorithms.naive import Layers, Problem, average, grad, zeros


def fedspeed(problem: Problem, lambda_: float, alpha: float, rho: float, corrections: str = "cohort") -> Layers:
    theta = problem.theta0
    shares = {client.number: problem.share(client) for cohort in problem.rounds for client in cohort}
    corrections_of: dict[int, Layers] = {}
    for cohort in problem.rounds:
        sent = []
        for client in cohort:
            g_i = corrections_of.get(client.number, zeros(theta))
            w = [layer.clone() for layer in theta]
            for batch in client.batches:
                g1 = grad(w, batch)
                g2 = grad([wk + rho * gk for wk, gk in zip(w, g1, strict=True)], batch)
                u = [(1 - alpha) * a + alpha * b - c for a, b, c in zip(g1, g2, g_i, strict=True)]
                w = [
                    wk - client.lr * (uk + (wk - tk) / lambda_ + problem.weight_decay * wk)
                    for wk, uk, tk in zip(w, u, theta, strict=True)
                ]
            g_i = [gk - (wk - tk) / lambda_ for gk, wk, tk in zip(g_i, w, theta, strict=True)]
            corrections_of[client.number] = g_i
            sent.append([wk - lambda_ * gk for wk, gk in zip(w, g_i, strict=True)] if corrections == "cohort" else w)
        mean = average(cohort, sent)
        if corrections == "all":
            for number, g_i in corrections_of.items():
                mean = [mk - lambda_ * shares[number] * gk for mk, gk in zip(mean, g_i, strict=True)]
        theta = [tk + problem.server_lr * (mk - tk) for tk, mk in zip(theta, mean, strict=True)]
    return theta
