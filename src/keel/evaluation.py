"""How good a model is on held-out examples, measured a part at a time so that any number of workers can share it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from keel.buffers import without_statistics
from keel.errors import KeelError
from keel.params import FlatModel
from keel.randomness import draws
from keel.task import Task

MOST_CLASSES = 256
"""Beyond it the accuracy of each class would fill the records and tell nobody anything."""


class Evaluator:
    """Evaluates flat models on a task's test examples."""

    def __init__(self, task: Task, local_buffers: bool = False):
        self.task = task
        self.parts = _parts(task, local_buffers)
        self.specials = torch.tensor(task.data.specials)
        self.model = (
            FlatModel(without_statistics(task.module)) if local_buffers else FlatModel(task.module, task.moving)
        )
        self.model.module.eval()

    def look_at(self, theta: Tensor, buffers: Tensor | None) -> None:
        """The model that is measured from now on."""
        self.model.weights.copy_(theta)
        self.model.set_buffers(buffers)

    @property
    def width(self) -> int:
        """Numbers that one part is measured in."""
        return 1 + 2 * self.task.data.classes

    @torch.no_grad()
    def measure(self, part: int) -> Tensor:
        """Of one part of the test examples: the loss in sum, and of each class how many were right and how many are."""
        data = self.task.data
        examples = data.test[self.parts[part]]
        targets, device = examples.targets, self.model.weights.device
        outputs = self.model.module(data.prepare(examples.inputs).to(device))
        measured = torch.zeros(self.width, dtype=torch.float64)
        measured[0] = self.task.loss(outputs, targets.to(device)).cpu().double().sum()
        if data.classes:
            counted = torch.isin(targets, self.specials, invert=True)
            right = targets[counted & (outputs.argmax(-1).cpu() == targets)]
            measured[1 : 1 + data.classes] = torch.bincount(right, minlength=data.classes)
            measured[1 + data.classes :] = torch.bincount(targets[counted], minlength=data.classes)
        return measured

    def quality(self, measured: Iterable[Tensor]) -> dict[str, Any]:
        """Test loss and, where the targets are labels, accuracy, also per class (None for one without examples).

        The parts are added up in their order, whoever measured them.
        """
        total = torch.zeros(self.width, dtype=torch.float64)
        for part in measured:
            total += part
        classes = self.task.data.classes
        quality: dict[str, Any] = {"test_loss": total[0].item() / len(self.task.data.test)}
        if classes:
            right, held = total[1 : 1 + classes], total[1 + classes :]
            if held.sum() == 0:
                raise KeelError("data: no test example has a target that counts; accepted: other test examples")
            quality["accuracy"] = right.sum().item() / held.sum().item()
            if classes <= MOST_CLASSES:
                per_class = zip(right.tolist(), held.tolist(), strict=True)
                quality["class_accuracy"] = [r / n if n else None for r, n in per_class]
        return quality


def _parts(task: Task, local_buffers: bool) -> list[Tensor]:
    """The rows of each part. Where a batch is normalised by its own statistics, it has to be a fair sample."""
    count = len(task.data.test)
    rows = torch.arange(count)
    if local_buffers:
        rows = torch.from_numpy(draws(0, "evaluation").permutation(count))
    parts = list(torch.split(rows, task.data.at_once))
    if local_buffers and len(parts) > 1 and len(parts[-1]) == 1:  # one example has no statistics
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
