"""One client after the other in this process: the reference for bits."""

from collections.abc import Iterator

from torch import Tensor

from keel.algorithms.base import Message
from keel.client import ClientResult, moved, probe_client, train_client
from keel.engines.base import CPU, InProcess, RoundWork


class Serial(InProcess):
    name = "serial"

    def probe(self, work: RoundWork) -> Iterator[Message]:
        received = moved(work.received, self.device)
        for client, buffers in zip(work.cohort.tolist(), work.buffers, strict=True):
            held = self.data.held(client)
            message = probe_client(self.recipe, self.model, client, held, received, work.ctx, self._here(buffers))
            yield moved(message, CPU)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        received = moved(work.received, self.device)
        for client, memory, buffers in zip(work.cohort.tolist(), work.memories, work.buffers, strict=True):
            held, known = self.data.held(client), moved(memory, self.device)
            yield train_client(
                self.recipe, self.model, client, held, received, known, work.ctx, self._here(buffers)
            ).to(CPU)

    def _here(self, buffers: Tensor | None) -> Tensor | None:
        return None if buffers is None else buffers.to(self.device)
