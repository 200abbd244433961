"""The inputs of a round's clients, and the collection of their results."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Report
from keel.core.client import ClientResult
from keel.core.clipping import RoundClipping
from keel.core.engine import LazySequence, RoundWork
from keel.core.observers import Observer
from keel.core.training_state import BUFFERS, TrainingState


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

    With clipping, all results are read before the first report. Observers see the messages as they were sent.
    """

    def __init__(
        self,
        state: TrainingState,
        work: RoundWork,
        weights: Sequence[float],
        averages_buffers: bool,
        clipping: RoundClipping | None = None,
    ):
        self.state, self.work, self.weights, self.clipping = state, work, weights, clipping
        self.mean_buffers = torch.zeros_like(state.buffers) if averages_buffers and state.buffers is not None else None
        self.losses: list[float] = []

    def reports(self, results: Iterable[ClientResult], observers: Sequence[Observer]) -> Iterator[Report]:
        received = self._received(results, observers)
        if self.clipping is not None:
            sent_buffers = None if self.mean_buffers is None else self.state.buffers
            received = self.clipping.results(self.work.cohort.tolist(), received, sent_buffers)
        for weight, result in zip(self.weights, received, strict=True):
            if self.mean_buffers is not None and result.buffers is not None:
                self.mean_buffers.add_(result.buffers, alpha=weight)
            yield Report(result.message, weight, result.steps)

    def _received(self, results: Iterable[ClientResult], observers: Sequence[Observer]) -> Iterator[ClientResult]:
        """Yield each result once its client state is staged and the observers have seen it."""
        watchers = [each for each in observers if type(each).client_reported is not Observer.client_reported]
        for client, weight, result in zip(self.work.cohort.tolist(), self.weights, results, strict=True):
            message, client_state = result.message, dict(result.state)
            if self.mean_buffers is not None and result.buffers is not None:
                message = {**message, BUFFERS: result.buffers}
            elif result.buffers is not None:
                client_state[BUFFERS] = result.buffers
            if client_state:
                self.state.clients.stage(client, client_state)
            self.losses.append(float(result.loss))
            for observer in observers:
                observer.message_received(message)
            if watchers:  # an engine may reuse the memory of a state that is staged
                result = replace(result, state={name: value.clone() for name, value in result.state.items()})
            for observer in watchers:
                observer.client_reported(client, weight, result)
            yield result
