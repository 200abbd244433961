"""Evaluation of a model on held-out examples, in chunks that any number of workers can share."""

import logging
from collections.abc import Iterable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from keel.core.buffers import without_statistics
from keel.core.client import LocalTraining
from keel.core.client_evaluation import ClientEvaluator, summarize_clients
from keel.core.flat_model import FlatModel
from keel.core.measurement import measure_examples
from keel.core.metrics import decode, encode
from keel.core.randomness import keyed_rng
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng
from keel.errors import KeelError

log = logging.getLogger(__name__)

MAX_CLASSES = 256
"""Beyond it the accuracy of each class is not recorded: it would fill the records."""


class Evaluator:
    """Evaluates flat models on a task's test examples."""

    def __init__(self, task: Task, local_buffers: bool = False, local: LocalTraining | None = None):
        self.task = task
        self.chunks = _chunks(task, local_buffers)
        self.clients: ClientEvaluator | None = None
        if task.client_tests is not None and local is not None:
            self.clients = ClientEvaluator(task, task.client_tests, local, local_buffers)
        self.model = (
            FlatModel(without_statistics(task.module)) if local_buffers else FlatModel(task.module, task.moving)
        )
        self.model.module.eval()
        self.undefined: set[str] = set()
        """The metrics that were not defined, of which a warning was logged."""

    def load_weights(self, theta: Tensor, buffers: Tensor | None) -> None:
        """Set the model that is evaluated from now on."""
        self.model.weights.copy_(theta)
        self.model.set_buffers(buffers)
        self.buffers = buffers

    @property
    def parts(self) -> int:
        """The number of parts that an engine measures: the chunks of the test examples, then groups of clients.

        The loop measures clients with personal models itself: it has the client states.
        """
        clients = 0 if self.clients is None or self.clients.personalised else self.clients.tests.parts
        return len(self.chunks) + clients

    @property
    def sums(self) -> int:
        """The number of sums of a chunk: the loss, and per class the correct and all predictions."""
        return 1 + 2 * self.task.data.classes

    def measure(self, part: int) -> Tensor:
        """Measure one part: the sums of a chunk and the encoded states of the metrics, or the metrics of clients."""
        if self.clients is not None and part >= len(self.chunks):
            return self.clients.measure(part - len(self.chunks), lambda _: self.model.weights, self.buffers)
        data, metrics = self.task.data, self.task.metrics
        with keyed_torch_rng(0, "evaluation", part):  # the items of a data set may be drawn at random
            measured = measure_examples(self.task, self.model, data.test[self.chunks[part]])
        sums = torch.zeros(self.sums, dtype=torch.float64)
        sums[0] = measured.loss
        if data.classes:
            counted = measured.targets[measured.counted]
            sums[1 : 1 + data.classes] = torch.bincount(measured.correct, minlength=data.classes)
            sums[1 + data.classes :] = torch.bincount(counted, minlength=data.classes)
        if not metrics:
            return sums
        return torch.cat([sums, encode([metric.state(measured.predictions, measured.targets) for metric in metrics])])

    def quality(self, parts: Iterable[Tensor]) -> dict[str, Any]:
        """The metrics: test loss, accuracy (also per class) where the targets are labels, and those of the task.

        The chunks' sums are added in their order, whichever worker measured them. A class without test examples has
        the accuracy None.
        """
        total, states, of_clients = torch.zeros(self.sums, dtype=torch.float64), [], []
        for part, measured in enumerate(parts):
            if part >= len(self.chunks):
                of_clients.append(measured)
                continue
            total += measured[: self.sums]
            if self.task.metrics:
                states.append(decode(measured[self.sums :]))
        classes = self.task.data.classes
        metrics: dict[str, Any] = {"test_loss": total[0].item() / len(self.task.data.test)}
        if classes:
            correct, count = total[1 : 1 + classes], total[1 + classes :]
            if count.sum() == 0:
                raise KeelError("data: no test example has a target that counts; provide other test examples")
            metrics["accuracy"] = correct.sum().item() / count.sum().item()
            if classes <= MAX_CLASSES:
                per_class = zip(correct.tolist(), count.tolist(), strict=True)
                metrics["class_accuracy"] = [c / n if n else None for c, n in per_class]
        metrics |= self._values(states)
        if self.clients is not None:
            metrics["clients"] = summarize_clients(torch.cat(of_clients), self.task.primary)
        return metrics

    def _values(self, states: list[list[list[Tensor]]]) -> dict[str, float | None]:
        """The metrics of the task from the states of all chunks; None where a metric is not finite."""
        values = {}
        for position, metric in enumerate(self.task.metrics):
            try:
                value = metric.value([chunk[position] for chunk in states])
            except Exception as error:  # a user's function may raise anything
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise KeelError(f"evaluation.metrics: {metric.name!r} fails ({reason})") from error
            values[metric.name] = value if isfinite(value) else None
            if not isfinite(value) and metric.name not in self.undefined:
                self.undefined.add(metric.name)
                log.warning("%s is not defined on the test examples (%s)", metric.name, value)
        return values


def _chunks(task: Task, local_buffers: bool) -> list[Tensor]:
    """The rows of each chunk. Where a batch is normalised by its own statistics, it must be a random sample."""
    count = len(task.data.test)
    rows = torch.arange(count)
    if local_buffers:
        rows = torch.from_numpy(keyed_rng(0, "evaluation").permutation(count))
    chunks = list(torch.split(rows, task.data.chunk_size))
    if local_buffers and len(chunks) > 1 and len(chunks[-1]) == 1:  # one example has no statistics
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks
