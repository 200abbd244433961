"""How good a model is on held-out examples."""

from typing import Any

import torch
from torch import Tensor

from keel.params import FlatModel
from keel.task import Task

BATCH = 512


class Evaluator:
    """Evaluates flat models on a task's test examples."""

    def __init__(self, task: Task):
        self.task = task
        self.model = FlatModel(task.module)
        self.model.module.eval()

    @torch.no_grad()
    def __call__(self, theta: Tensor) -> dict[str, Any]:
        """Test loss and, where the targets are labels, accuracy, also per class (None for one without examples)."""
        self.model.weights.copy_(theta)
        test, classes = self.task.data.test, self.task.data.classes
        loss, right, held = 0.0, torch.zeros(classes), torch.zeros(classes)
        for start in range(0, len(test), BATCH):
            inputs, targets = test.inputs[start : start + BATCH], test.targets[start : start + BATCH]
            outputs = self.model.module(inputs)
            loss += self.task.loss(outputs, targets).double().sum().item()
            if classes:
                right += torch.bincount(targets[outputs.argmax(1) == targets], minlength=classes)
                held += torch.bincount(targets, minlength=classes)
        quality: dict[str, Any] = {"test_loss": loss / len(test)}
        if classes:
            quality["accuracy"] = right.sum().item() / len(test)
            per_class = zip(right.tolist(), held.tolist(), strict=True)
            quality["class_accuracy"] = [r / n if n else None for r, n in per_class]
        return quality
