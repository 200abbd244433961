"""The engine `serial`: one client after the other in this process. Its bits are the reference for the other engines."""

from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from keel.algorithms.base import Message
from keel.core.client import ClientResult, probe_client, to_device, train_client
from keel.core.engine import CPU, InProcess, RoundWork
from keel.core.replay import LocalGradient, local_gradient
from keel.engines.kinds import ENGINES


class Serial(InProcess):
    """Trains one client after the other."""

    name = "serial"
    bit_identical = ENGINES["serial"].bit_identical

    @cached_property
    def gradient_of(self) -> LocalGradient:
        """The gradient of local training: replayed, if the model allows it."""
        batch = self.local.config.batch
        if self.data.train.variable:  # a program per length would be recorded again and again
            return LocalGradient(self.model, self.local.loss)
        trials = [self.data.trial_minibatch(batch, offset) for offset in (0, batch, 2 * batch)]
        return local_gradient(self.model, self.local.loss, trials, self.moving)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        received = to_device(work.received, self.device)
        for client, buffers in zip(work.cohort.tolist(), work.buffers, strict=True):
            examples = self.data.client_examples(client)
            message = probe_client(
                self.local, self.model, client, examples, received, work.ctx, self._on_device(buffers)
            )
            yield to_device(message, CPU)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        received = to_device(work.received, self.device)
        for client, state, buffers in zip(work.cohort.tolist(), work.client_states, work.buffers, strict=True):
            examples, state = self.data.client_examples(client), to_device(state, self.device)
            yield train_client(
                self.local, self.gradient_of, client, examples, received, state, work.ctx, self._on_device(buffers)
            ).to(CPU)

    def _on_device(self, buffers: Tensor | None) -> Tensor | None:
        return None if buffers is None else buffers.to(self.device)
