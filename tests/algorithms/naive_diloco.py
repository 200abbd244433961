"""A reference implementation of DiLoCo, and of AdamW with a state that a client keeps between its rounds."""

from dataclasses import dataclass

from tests.algorithms.naive import Client, Layers, Problem, average, grad, local, zeros


@dataclass
class AdamW:
    """Loshchilov and Hutter, ICLR 2019, with the defaults of torch.optim."""

    first: Layers
    second: Layers
    steps: int = 0

    def step(self, w: Layers, g: Layers, lr: float, weight_decay: float) -> Layers:
        self.steps += 1
        self.first = [0.9 * m + 0.1 * gk for m, gk in zip(self.first, g, strict=True)]
        self.second = [0.999 * s + 0.001 * gk * gk for s, gk in zip(self.second, g, strict=True)]
        new = []
        for wk, m, s in zip(w, self.first, self.second, strict=True):
            mean, square = m / (1 - 0.9**self.steps), s / (1 - 0.999**self.steps)
            new.append(wk - lr * weight_decay * wk - lr * mean / (square.sqrt() + 1e-8))
        return new


def diloco(problem: Problem, momentum: float, inner: str) -> Layers:
    """torch.optim.SGD's Nesterov form at the server: the gradient is the mean of theta - w_i."""
    theta, m = problem.theta0, zeros(problem.theta0)
    kept: dict[int, AdamW] = {}

    def trained(client: Client) -> Layers:
        if inner == "sgd":
            return local(problem, client, theta, grad)
        optimizer = kept.setdefault(client.number, AdamW(zeros(theta), zeros(theta)))
        w = [layer.clone() for layer in theta]
        for batch in client.batches:
            w = optimizer.step(w, grad(w, batch), client.lr, problem.weight_decay)
        return w

    for cohort in problem.rounds:
        mean_end = average(cohort, [trained(client) for client in cohort])
        delta = [a - b for a, b in zip(theta, mean_end, strict=True)]
        m = [momentum * a + b for a, b in zip(m, delta, strict=True)]
        theta = [a - problem.server_lr * (d + momentum * mk) for a, d, mk in zip(theta, delta, m, strict=True)]
    return theta
