"""A task: the model, the data, the loss and the metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keel.core.adapted import own_loss
from keel.core.choices import Layout
from keel.core.client_tests import ClientTests
from keel.core.examples import FederatedData
from keel.core.flat_model import Loss
from keel.core.losses import DEFAULTS, named_loss
from keel.core.metrics import Metric
from keel.core.records import PrimaryMetric


@dataclass(frozen=True)
class Task:
    """A model, its federated data and its loss, checked against each other."""

    module: nn.Module
    """It takes one tensor and returns one (see `adapted.py`)."""
    data: FederatedData
    loss: Loss
    moving: tuple[str, ...] = ()
    """The names of the model's buffers that training changes."""
    layout: Layout = "contiguous"
    """The memory layout of the transformed images."""
    metrics: tuple[Metric, ...] = ()
    """What is measured besides the loss and, where targets are labels, accuracy."""
    primary_metric: PrimaryMetric | None = None
    """The metric by which runs are compared; by default accuracy, or the loss where targets are not labels."""

    next_token: bool = False
    """Whether the model's own loss compares its output at a position with the target at the next one."""
    client_tests: ClientTests | None = None
    """The held-out examples of clients that are evaluated one by one."""

    @property
    def primary(self) -> PrimaryMetric:
        """The metric by which runs are compared."""
        if self.primary_metric is not None:
            return self.primary_metric
        return PrimaryMetric() if self.data.classes else PrimaryMetric("test_loss", maximize=False)

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The predictions and the targets that metrics compare."""
        if self.loss is not own_loss:
            if self.data.classes == 2 and outputs.numel() == targets.numel():  # one logit: that of class 1
                logit = outputs.reshape(targets.shape)
                return torch.stack([torch.zeros_like(logit), logit], -1), targets
            return outputs, targets
        shape = (*targets.shape, -1) if self.data.classes else targets.shape
        predictions = outputs[:, 1:].reshape(shape)
        return (predictions[:, :-1], targets[:, 1:]) if self.next_token else (predictions, targets)


def default_loss(data: FederatedData) -> Loss:
    """The loss that suits the targets."""
    return named_loss(DEFAULTS[data.kind], data.kind, data.specials)
