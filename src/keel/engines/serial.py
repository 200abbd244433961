"""One client after the other in this process: the reference for bits."""

from collections.abc import Iterator

from keel.algorithms.base import Message
from keel.client import ClientResult, probe_client, train_client
from keel.engines.base import Problem, RoundWork
from keel.params import FlatModel


class Serial:
    name = "serial"

    def __init__(self, problem: Problem):
        self.recipe, self.data = problem.recipe, problem.task.data
        self.model = FlatModel(problem.task.module, problem.task.moving)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        for client in work.cohort.tolist():
            yield probe_client(self.recipe, self.model, client, self.data.client(client), work.received, work.ctx)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        for client, memory, buffers in zip(work.cohort.tolist(), work.memories, work.buffers, strict=True):
            examples = self.data.client(client)
            yield train_client(self.recipe, self.model, client, examples, work.received, memory, work.ctx, buffers)
