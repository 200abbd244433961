"""A task: the model, the data and the loss that are trained on."""

from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from keel.core.examples import FederatedData
from keel.core.flat_model import Loss
from keel.core.records import PrimaryMetric
from keel.core.transforms import Layout


@dataclass(frozen=True)
class Task:
    """A model, its federated data and its loss, checked against each other."""

    module: nn.Module
    data: FederatedData
    loss: Loss
    moving: tuple[str, ...] = ()
    """The names of the model's buffers that training changes."""
    layout: Layout = "contiguous"
    """The memory layout of the transformed images."""

    @property
    def primary(self) -> PrimaryMetric:
        """The metric by which runs are compared."""
        return PrimaryMetric() if self.data.classes else PrimaryMetric("test_loss", maximize=False)


def default_loss(data: FederatedData) -> Loss:
    return per_sequence_cross_entropy(data.specials) if data.specials else per_example_cross_entropy


def per_example_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def batched_loss(loss: Loss) -> Loss:
    """Return the same loss in the form that takes the fewest operations over stacked clients."""
    return _label_cross_entropy if loss is per_example_cross_entropy else loss


def _label_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy without a test for ignored targets, which labels from 0 on never are."""
    if outputs.dim() != 2:
        return per_example_cross_entropy(outputs, targets)
    return -log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)


@cache
def per_sequence_cross_entropy(specials: tuple[int, ...]) -> Loss:
    """The mean cross entropy over the positions of a sequence that are not padding, which is the first special."""
    padding = specials[0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=padding)
        return losses.sum(1) / (targets != padding).sum(1).clamp(min=1)

    return loss
