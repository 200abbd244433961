"""Simulation of small problems with known gradients: the algorithms alone, without model, data set and engine."""

from collections.abc import Callable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, Context, Path, Report, State
from keel.core.sampling import Sampler

Gradients = Callable[[Tensor, Tensor], Tensor]
"""The gradients of clients at their local models: of a row per client, and the numbers of the clients."""


def server_models(
    algorithm: Algorithm,
    gradients: Gradients,
    sampler: Sampler,
    theta: Tensor,
    *,
    rounds: int,
    steps: int,
    lr: float,
    server_lr: float,
) -> Tensor:
    """Return the server's model before the first round and after each round, a row per model.

    The clients of a cohort are the rows of one tensor and have equal weights. The dtype is that of `theta`.

    Args:
        algorithm: An algorithm without client state.
        gradients: The gradients, without noise unless the function adds it.
        sampler: The cohort of each round.
        theta: The initial model.
        rounds: The number of rounds, T.
        steps: Local steps per round, J.
        lr: The local learning rate.
        server_lr: The server learning rate.
    """
    server = algorithm.init_server(theta)
    models = [theta]
    for t in range(1, rounds + 1):
        cohort = torch.from_numpy(sampler.cohort(t))
        share = len(cohort) / sampler.clients
        ctx = Context(t, sampler.clients, len(cohort), share, sampler.period, lr, server_lr)
        server = _round(algorithm, gradients, cohort, server, ctx, steps)
        models.append(server["theta"])
    return torch.stack(models)


def _round(
    algorithm: Algorithm, gradients: Gradients, cohort: Tensor, server: State, ctx: Context, steps: int
) -> State:
    """Return the server state after a round."""
    received, client_ctx = algorithm.broadcast(server, ctx), ctx.for_client(steps)
    start = w = received["theta"].expand(len(cohort), -1)
    for _ in range(steps):
        u = algorithm.direction(w, lambda at: gradients(at, cohort), received, {}, client_ctx)
        assert isinstance(u, Tensor), "no algorithm of the simulation has a step state"
        d = algorithm.displacement(w, received, {}, client_ctx)
        w = w - ctx.lr * u if d is None else w - ctx.lr * u + d
    message, _ = algorithm.report(Path(start, w), received, {}, client_ctx)
    reports = [
        Report({name: rows[k] for name, rows in message.items()}, 1 / len(cohort), steps) for k in range(len(cohort))
    ]
    return algorithm.aggregate(server, reports, ctx)
