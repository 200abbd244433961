"""A reference implementation of FedPer: the server's layers, and the layers of the clients that took part."""

from tests.algorithms.naive import Layers, Problem, average, grad, local


def fedper(problem: Problem, personal_tensors: int) -> tuple[Layers, dict[int, Layers]]:
    count = len(problem.theta0) - personal_tensors
    base, initial = problem.theta0[:count], problem.theta0[count:]
    heads: dict[int, Layers] = {}
    for cohort in problem.rounds:
        ends = []
        for client in cohort:
            w = local(problem, client, [*base, *heads.get(client.number, initial)], grad)
            ends.append(w[:count])
            heads[client.number] = w[count:]
        mean_end = average(cohort, ends)
        base = [b + problem.server_lr * (e - b) for b, e in zip(base, mean_end, strict=True)]
    return [*base, *initial], {client: [*base, *head] for client, head in heads.items()}
