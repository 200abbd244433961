"""The inputs of a round's clients, and the collection of their results."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Message, Report
from keel.core.client import ClientResult
from keel.core.clipping import RoundClipping
from keel.core.engine import LazySequence
from keel.core.observers import Observer
from keel.core.training_state import BUFFERS, TrainingState

Decode = Callable[[Message, int], Message]
"""A function of a message and the client that sent it."""


def client_inputs(
    clients: list[int], state: TrainingState, initial: ClientState, local_buffers: bool
) -> tuple[Sequence[ClientState], Sequence[Tensor | None]]:
    """Each client's state and the buffers it starts from, read when they are needed.

    Args:
        initial: The state of a client that has none yet.
    """

    @lru_cache(maxsize=1)
    def stored(client: int) -> ClientState:
        return state.clients.get(client, {})

    def client_state(client: int) -> ClientState:
        return {name: value for name, value in stored(client).items() if name != BUFFERS} or initial

    def buffers(client: int) -> Tensor | None:
        return stored(client).get(BUFFERS, state.buffers) if local_buffers else state.buffers

    return LazySequence(clients, client_state), LazySequence(clients, buffers)


class ReportCollector:
    """Collects the clients' results in the order of the cohort: stages states, averages buffers, notifies observers.

    Observers count the messages as they were sent, also those that are rejected; all else reads the decoded ones.
    """

    def __init__(
        self, state: TrainingState, averages_buffers: bool, observers: Sequence[Observer], decode: Decode | None = None
    ):
        self.state, self.observers, self.decode = state, observers, decode
        self.mean_buffers = torch.zeros_like(state.buffers) if averages_buffers and state.buffers is not None else None
        self.losses: dict[int, float] = {}

    def received(
        self, cohort: Sequence[int], weights: Sequence[float], results: Iterable[ClientResult]
    ) -> Iterator[ClientResult]:
        """Yield each result once the observers have seen it."""
        watchers = [each for each in self.observers if type(each).client_reported is not Observer.client_reported]
        for client, weight, result in zip(cohort, weights, results, strict=True):
            sent = result.message
            if self.mean_buffers is not None and result.buffers is not None:
                sent = {**sent, BUFFERS: result.buffers}
            self.losses[client] = float(result.loss)
            for observer in self.observers:
                observer.message_received(sent)
            if self.decode is not None:
                result = replace(result, message=self.decode(result.message, client))
            if watchers:  # an engine may reuse the memory of a state that is staged
                result = replace(result, state={name: value.clone() for name, value in result.state.items()})
            for observer in watchers:
                observer.client_reported(client, weight, result)
            yield result

    def clipped(
        self, clipping: RoundClipping, cohort: Sequence[int], results: Iterable[ClientResult]
    ) -> list[ClientResult]:
        """The clipped results without those that are rejected. All are read first."""
        return clipping.results(cohort, results, None if self.mean_buffers is None else self.state.buffers)

    def reports(
        self, cohort: Sequence[int], weights: Sequence[float], results: Iterable[ClientResult]
    ) -> Iterator[Report]:
        """Yield the report of each client that takes part, once its client state is staged."""
        for client, weight, result in zip(cohort, weights, results, strict=True):
            client_state = dict(result.state)
            if result.buffers is not None:
                if self.mean_buffers is not None:
                    self.mean_buffers.add_(result.buffers, alpha=weight)
                else:
                    client_state[BUFFERS] = result.buffers
            if client_state:
                self.state.clients.stage(client, client_state)
            yield Report(result.message, weight, result.steps)
