"""Evaluation of a model on held-out examples, in chunks that any number of workers can share."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from keel.core.buffers import without_statistics
from keel.core.flat_model import FlatModel
from keel.core.randomness import keyed_rng
from keel.core.task import Task
from keel.errors import KeelError

MAX_CLASSES = 256
"""Beyond it the accuracy of each class is not recorded: it would fill the records."""


class Evaluator:
    """Evaluates flat models on a task's test examples."""

    def __init__(self, task: Task, local_buffers: bool = False):
        self.task = task
        self.parts = _chunks(task, local_buffers)
        self.specials = torch.tensor(task.data.specials)
        self.model = (
            FlatModel(without_statistics(task.module)) if local_buffers else FlatModel(task.module, task.moving)
        )
        self.model.module.eval()

    def load_weights(self, theta: Tensor, buffers: Tensor | None) -> None:
        """Set the model that is evaluated from now on."""
        self.model.weights.copy_(theta)
        self.model.set_buffers(buffers)

    @property
    def width(self) -> int:
        """The number of sums that `measure` returns."""
        return 1 + 2 * self.task.data.classes

    @torch.no_grad()
    def measure(self, part: int) -> Tensor:
        """The sums over one chunk of the test examples: the loss, and per class the correct and all predictions."""
        data = self.task.data
        examples = data.test[self.parts[part]]
        targets, device = examples.targets, self.model.weights.device
        outputs = self.model.module(data.transform(examples.inputs).to(device))
        sums = torch.zeros(self.width, dtype=torch.float64)
        sums[0] = self.task.loss(outputs, targets.to(device)).cpu().double().sum()
        if data.classes:
            counted = torch.isin(targets, self.specials, invert=True)
            correct = targets[counted & (outputs.argmax(-1).cpu() == targets)]
            sums[1 : 1 + data.classes] = torch.bincount(correct, minlength=data.classes)
            sums[1 + data.classes :] = torch.bincount(targets[counted], minlength=data.classes)
        return sums

    def quality(self, parts: Iterable[Tensor]) -> dict[str, Any]:
        """The metrics: test loss and, where the targets are labels, accuracy, also per class.

        The chunks' sums are added in their order, whichever worker measured them. A class without test examples has
        the accuracy None.
        """
        total = torch.zeros(self.width, dtype=torch.float64)
        for sums in parts:
            total += sums
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
        return metrics


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
