"""One client after the other in this process: the reference for bits."""

from collections.abc import Iterator

from keel.algorithms.base import Message
from keel.client import ClientResult, probe_client, train_client
from keel.engines.base import Problem, RoundWork
from keel.params import FlatModel


class Serial:
    name = "serial"

    def __init__(self, problem: Problem):
        self.problem = problem
        self.model = FlatModel(problem.task.module)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        task = self.problem.task
        for client in work.cohort:
            yield probe_client(self.model, task.loss, task.data.client(client), work.received)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        problem = self.problem
        for client, memory in zip(work.cohort, work.memories, strict=True):
            yield train_client(
                problem.algorithm,
                self.model,
                problem.task.loss,
                problem.task.data.client(client),
                work.received,
                memory,
                work.ctx,
                problem.work,
                problem.minibatch_stream(work.ctx.round, client),
            )
