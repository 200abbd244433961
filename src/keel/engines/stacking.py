"""Check whether an algorithm's client functions can run on stacked clients, as the engine `cohort` runs them.

`cohort` gives `start`, `direction` and `report` tensors with one row per client. A function that reduces over all
elements (`delta.norm()`) mixes the clients without an error, and the model is silently wrong. So before the first round
these functions run on two clients with random inputs, stacked and separately, and the results are compared: in the
first round, in an early one and in a late one.

The check calls the functions with a few values only. It cannot detect a function that mixes clients under a condition
that those values do not meet, such as `20 < ctx.round < 50`, `ctx.lr < 0.01` or a large norm of the update.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, ClientState, Context, Message, Path, Report, State
from keel.core.torch_randomness import keyed_torch_rng
from keel.engines.cohort import client_row, stack_states
from keel.errors import KeelError

RTOL = 1e-4
"""The largest difference that counts as rounding, relative to the tensor's largest element."""
ATOL = 1e-7
"""The same in absolute terms, for tensors that cancel to about zero; inputs are of order one."""
STEPS = (3, 5)
"""Local steps of the two clients. They differ, so that a use of `ctx.steps` that mixes clients shows."""
ROUNDS = (1, 5, 10_000)
"""The rounds that are checked. All clients of round 1 are new; in the others, returning clients took part before."""

LARGEST = 4096
"""The largest number of elements of a tensor in the check, which takes forty times the memory of its tensors."""


def stacking_error(algorithm: Algorithm, sizes: Sequence[int], seed: int = 0) -> str | None:
    """Return why the algorithm cannot run on stacked clients; None if it can.

    Args:
        sizes: The number of elements of each of the model's parameter tensors.

    Raises:
        KeelError: The algorithm does not fit the model.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    try:
        with keyed_torch_rng(seed, "stacking"):
            small = tuple(min(size, LARGEST) for size in sizes)
            errors = (_Check(algorithm, small, round).error() for round in ROUNDS)
            return next((error for error in errors if error is not None), None)
    except KeelError:
        raise
    except Exception as error:  # the user's functions may raise anything
        return f"{type(algorithm).__name__} fails on random inputs ({_summary(error)})"
    finally:
        torch.set_num_threads(threads)


class _Check:
    """The random inputs of two clients in one round, and the comparison of their results."""

    def __init__(self, algorithm: Algorithm, sizes: tuple[int, ...], round: int):
        self.algorithm, self.size, self.ctx = algorithm, sum(sizes), _context(round, sizes)
        theta = self.random()
        server, ctx = algorithm.init_server(theta), self.ctx
        received = algorithm.broadcast(server, ctx)
        if algorithm.probes:
            probes = [Report({"gradient": self.random()}, 0.5, steps=0) for _ in STEPS]
            received = {**received, **algorithm.absorb(server, probes, ctx)[1]}
        # A momentum that is still zero would hide what it is multiplied by.
        self.received = {name: self._moved(value) for name, value in received.items()}
        fresh = algorithm.init_client(theta)
        self.pairs = {"two new clients": [fresh, fresh]}
        if round > 1:
            before = (round - 3, round - 2)
            returning = [self._report([0], [fresh], self._paths([fresh]), _context(t, sizes), [3])[1] for t in before]
            self.pairs = {"two returning clients": returning, "a new and a returning client": [fresh, returning[0]]}

    def random(self, rows: int | None = None) -> Tensor:
        return torch.randn((self.size,) if rows is None else (rows, self.size))

    def error(self) -> str | None:
        """Return how stacked clients differ from the same clients run separately; None if they do not."""
        name = type(self.algorithm).__name__
        for clients, states in self.pairs.items():
            if any(state.keys() != states[0].keys() for state in states):
                return f"{name} changes the names in its client state from {sorted(states[0])} to {sorted(states[1])}"
            for function, run in self._functions(states):
                alone = [run([row]) for row in range(len(states))]
                try:
                    stacked = run(list(range(len(states))))
                except Exception as error:  # the user's function may raise anything
                    return f"{name}.{function} fails when two clients are stacked in one tensor ({_summary(error)})"
                if any(not _same(client_row(stacked, row), result) for row, result in enumerate(alone)):
                    return (
                        f"{name}.{function} gives different results when two clients are stacked in one tensor "
                        f"({clients}, round {self.ctx.round})"
                    )
        return None

    def _functions(self, states: list[ClientState]) -> Iterator[tuple[str, Callable[[list[int]], Message]]]:
        """Yield the client functions, each as a function of the clients that it runs on."""
        clients = len(states)
        ctx = self.ctx
        w, scale, shift = self.random(clients), self.random(clients), self.random(clients)
        paths = self._paths(states)
        algorithm, received = self.algorithm, self.received

        def start(rows: list[int]) -> Message:
            state = _together([states[row] for row in rows])
            return {"w": algorithm.start(received, state, ctx.for_client(_steps([STEPS[row] for row in rows])))}

        def two_steps(rows: list[int]) -> Message:
            point, state = _pick(w, rows), _together([states[row] for row in rows])
            client_ctx = ctx.for_client(_steps([STEPS[row] for row in rows]))
            results: Message = {}

            def gradient(at: Tensor) -> Tensor:
                return _pick(scale, rows) * at.expand_as(point) + _pick(shift, rows)

            step_state = _for_rows(algorithm.init_steps(received, state, client_ctx), len(rows))
            for number in (1, 2):
                known = {**state, **step_state}
                u = algorithm.direction(point, gradient, received, known, client_ctx)
                if isinstance(u, tuple):
                    u, step_state = u
                d = algorithm.displacement(point, received, known, client_ctx)
                results |= {f"step state {number} {name}": value for name, value in step_state.items()}
                results |= {f"u {number}": u} | ({} if d is None else {f"d {number}": d.expand_as(point)})
                point = point - 0.1 * u
            return results

        def report(rows: list[int]) -> Message:
            steps = [STEPS[row] for row in rows]
            message, state = self._report(rows, [states[row] for row in rows], paths, ctx, steps)
            sent = {f"message {name}": value for name, value in message.items()}
            return sent | {f"state {name}": value for name, value in state.items()}

        yield "start", start
        yield "direction", two_steps
        yield "report", report

    def _report(
        self, rows: list[int], states: list[ClientState], paths: dict[str, Tensor], ctx: Context, steps: list[int]
    ) -> tuple[Message, ClientState]:
        state, client_ctx = _together(states), ctx.for_client(_steps(steps))
        step_state = _for_rows(self.algorithm.init_steps(self.received, state, client_ctx), len(rows))
        path = Path(**{name: _pick(value, rows) for name, value in paths.items()}, step_state=step_state)
        return self.algorithm.report(path, self.received, state, client_ctx)

    def _paths(self, states: list[ClientState]) -> dict[str, Tensor]:
        """Return the random fields of a Path with one row per client; only those that the algorithm asks for."""
        clients, ctx = len(states), self.ctx.for_client(STEPS[0])
        start = torch.stack([self.algorithm.start(self.received, _together([state]), ctx) for state in states])
        fields = {"start": start, "end": start + self.random(clients)}
        fields |= {name: self.random(clients) for name in sorted(self.algorithm.observes)}
        return fields

    def _moved(self, value: Tensor) -> Tensor:
        """Return a model-sized tensor with positive noise added, so that what is non-negative stays so."""
        if value.numel() != self.size or not value.is_floating_point():
            return value
        return value + 0.5 * (1 + torch.rand_like(value))


def _context(round: int, sizes: tuple[int, ...]) -> Context:
    return Context(round=round, clients=10, cohort=2, share=0.2, period=5.0, lr=0.1, server_lr=1.0, sizes=sizes)


def _steps(steps: list[int]) -> int | Tensor:
    """Return `ctx.steps`: a number for one client, a column for several."""
    return steps[0] if len(steps) == 1 else torch.tensor(steps).float()[:, None]


def _for_rows(step_state: State, rows: int) -> State:
    """Return the step state as `cohort` passes it: with a row per client."""
    return step_state if rows == 1 else {name: value.expand(rows, -1) for name, value in step_state.items()}


def _pick(rows: Tensor, chosen: list[int]) -> Tensor:
    """Return one client's vector, or the matrix of several."""
    return rows[chosen[0]].clone() if len(chosen) == 1 else rows[chosen]


def _together(states: list[ClientState]) -> ClientState:
    """Return one client's state, or the stacked state of several; a copy, which the algorithm may overwrite."""
    if len(states) == 1:
        return {name: value.clone() for name, value in states[0].items()}
    return stack_states(states)


def _same(one: Message, other: Message) -> bool:
    return one.keys() == other.keys() and all(_close(value, other[name]) for name, value in one.items())


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    largest = torch.stack([one, other]).abs().nan_to_num(0, 0, 0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=RTOL * largest + ATOL, equal_nan=True)


def _summary(error: Exception) -> str:
    lines: list[Any] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
