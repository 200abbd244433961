"""How good a model is on held-out examples."""

from typing import Any

import torch
from torch import Tensor

from keel.buffers import without_statistics
from keel.params import FlatModel
from keel.task import Task

MOST_CLASSES = 256
"""Beyond it the accuracy of each class would fill the records and tell nobody anything."""


class Evaluator:
    """Evaluates flat models on a task's test examples."""

    def __init__(self, task: Task, local_buffers: bool = False):
        self.task = task
        self.model = (
            FlatModel(without_statistics(task.module)) if local_buffers else FlatModel(task.module, task.moving)
        )
        self.model.module.eval()

    @torch.no_grad()
    def __call__(self, theta: Tensor, buffers: Tensor | None = None) -> dict[str, Any]:
        """Test loss and, where the targets are labels, accuracy, also per class (None for one without examples)."""
        self.model.weights.copy_(theta)
        self.model.set_buffers(buffers)
        data = self.task.data
        test, classes = data.test, data.classes
        uncounted = torch.tensor(data.specials)
        loss, right, held = 0.0, torch.zeros(classes), torch.zeros(classes)
        for rows in torch.split(torch.arange(len(test)), data.at_once):
            batch = test[rows]
            targets, outputs = batch.targets, self.model.module(data.prepare(batch.inputs))
            loss += self.task.loss(outputs, targets).double().sum().item()
            if classes:
                found = outputs.argmax(-1)
                counted = torch.isin(targets, uncounted, invert=True)
                right += torch.bincount(targets[counted & (found == targets)], minlength=classes)
                held += torch.bincount(targets[counted], minlength=classes)
        quality: dict[str, Any] = {"test_loss": loss / len(test)}
        if classes:
            quality["accuracy"] = right.sum().item() / held.sum().item()
            if classes <= MOST_CLASSES:
                per_class = zip(right.tolist(), held.tolist(), strict=True)
                quality["class_accuracy"] = [r / n if n else None for r, n in per_class]
        return quality
