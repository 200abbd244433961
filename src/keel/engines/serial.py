"""One client after the other in this process: the reference for bits."""

from collections.abc import Iterator

from keel.algorithms.base import Message
from keel.client import ClientResult, probe_client, train_client
from keel.engines.base import InProcess, Problem, RoundWork
from keel.params import FlatModel


class Serial(InProcess):
    name = "serial"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.recipe, self.data = problem.recipe, problem.task.data
        self.model = FlatModel(problem.task.module, problem.task.moving)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        for client, buffers in zip(work.cohort.tolist(), work.buffers, strict=True):
            held = self.data.held(client)
            yield probe_client(self.recipe, self.model, client, held, work.received, work.ctx, buffers)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        for client, memory, buffers in zip(work.cohort.tolist(), work.memories, work.buffers, strict=True):
            held = self.data.held(client)
            yield train_client(self.recipe, self.model, client, held, work.received, memory, work.ctx, buffers)
