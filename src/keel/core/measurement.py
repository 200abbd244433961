"""What a model returns for some examples, in the form in which losses and metrics compare it with the targets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.core.examples import Examples
from keel.core.fast_path import calling_all_parts
from keel.core.flat_model import FlatModel
from keel.core.metrics import counted_targets
from keel.core.task import Task


@dataclass(frozen=True)
class Measurement:
    """The loss of some examples, and their predictions and targets as metrics compare them."""

    loss: float
    """The sum over the examples."""
    predictions: Tensor
    targets: Tensor
    counted: Tensor
    """Where the targets are class labels: which of them accuracy counts; padding and special tokens do not count."""

    @property
    def correct(self) -> Tensor:
        """The targets that the model predicts, of those that count."""
        return self.targets[self.counted & (self.predictions.argmax(-1) == self.targets)]


@torch.no_grad()
def measure_examples(task: Task, model: FlatModel, examples: Examples) -> Measurement:
    """Measure a model on stored examples; its module is in evaluation mode."""
    device = model.weights.device
    with calling_all_parts(model.module):
        outputs = model.module(task.data.transform(examples.inputs).to(device))
    loss = float(task.loss(outputs, examples.targets.to(device)).cpu().double().sum())
    predictions, targets = task.compared(outputs.cpu(), examples.targets)
    return Measurement(loss, predictions, targets, counted_targets(targets, task.data.specials))
