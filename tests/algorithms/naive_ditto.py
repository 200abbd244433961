"""A reference implementation of Ditto: the server's model, and the personal models of the clients that took part."""

from tests.algorithms.naive import Layers, Problem, grad, local, server_step


def ditto(problem: Problem, lambda_: float) -> tuple[Layers, dict[int, Layers]]:
    theta = problem.theta0
    personal: dict[int, Layers] = {}
    for cohort in problem.rounds:
        ends = [local(problem, client, theta, grad) for client in cohort]
        for client in cohort:
            v = personal.get(client.number, problem.theta0)
            for batch in client.batches:
                v = [
                    vk - client.lr * (gk + lambda_ * (vk - tk))
                    for vk, gk, tk in zip(v, grad(v, batch), theta, strict=True)
                ]
            personal[client.number] = v
        theta = server_step(problem, cohort, theta, ends)
    return theta, personal
