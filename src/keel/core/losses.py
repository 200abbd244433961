"""Losses by name, and the forms of a user's loss that Keel accepts.

Keel needs one loss per example: it takes the mean over a minibatch itself, and over examples that a batched program
pads. A loss that is already reduced to a mean, as most of torch.nn's are by default, is accepted too.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keel.core.flat_model import Loss
from keel.errors import KeelError


def per_example_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits (examples, classes) and class labels."""
    return F.cross_entropy(outputs, targets, reduction="none")


@cache
def per_sequence_cross_entropy(specials: tuple[int, ...] = ()) -> Loss:
    """The mean cross entropy over the positions of a sequence that are not padding, which is the first special.

    Outputs have the shape (examples, positions, classes). Without specials, negative targets are padding.
    """
    padding = specials[0] if specials else -1

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets if specials else targets.clamp(min=-1)
        losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=padding)
        return losses.sum(1) / (targets != padding).sum(1).clamp(min=1)

    return loss


def per_example_mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error of each example."""
    return _elementwise(F.mse_loss, outputs, targets)


def per_example_mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean absolute error of each example."""
    return _elementwise(F.l1_loss, outputs, targets)


def per_example_huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean Huber loss (delta = 1) of each example."""
    return _elementwise(F.huber_loss, outputs, targets)


def per_example_bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """The binary cross entropy of logits and 0/1 targets, averaged over the labels of each example."""
    return _elementwise(F.binary_cross_entropy_with_logits, outputs, targets)


def batched_loss(loss: Loss) -> Loss:
    """Return the same loss in the form that takes the fewest operations over stacked clients."""
    return _label_cross_entropy if loss is per_example_cross_entropy else loss


def _label_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy without a test for ignored targets, which labels from 0 on never are."""
    if outputs.dim() != 2:
        return per_example_cross_entropy(outputs, targets)
    return -F.log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)


def _elementwise(loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of each example, with the outputs in the shape of the targets.

    (n, 1) and (n) would otherwise be broadcast to (n, n).
    """
    if outputs.numel() != targets.numel():
        of_one = tuple(outputs.shape[1:]), tuple(targets.shape[1:])
        raise ValueError(f"an example has outputs of shape {of_one[0]} and a target of shape {of_one[1]}")
    return _mean(loss(outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction="none"))


def _mean(losses: Tensor) -> Tensor:
    """Return the mean over all dimensions but the first."""
    return losses.reshape(len(losses), -1).mean(1)


@dataclass(frozen=True)
class NamedLoss:
    """A built-in loss: how it is made, and the kinds of task that it suits."""

    make: Callable[[tuple[int, ...]], Loss]
    """A function of the special targets (see Dataset) that returns the loss."""
    tasks: frozenset[str]


LOSSES = {
    "cross_entropy": NamedLoss(lambda specials: per_example_cross_entropy, frozenset({"classification"})),
    "sequence_cross_entropy": NamedLoss(per_sequence_cross_entropy, frozenset({"sequence"})),
    "mse": NamedLoss(lambda specials: per_example_mse, frozenset({"regression"})),
    "mae": NamedLoss(lambda specials: per_example_mae, frozenset({"regression"})),
    "huber": NamedLoss(lambda specials: per_example_huber, frozenset({"regression"})),
    "bce": NamedLoss(lambda specials: per_example_bce, frozenset({"multilabel", "classification"})),
}
DEFAULTS = {
    "classification": "cross_entropy",
    "sequence": "sequence_cross_entropy",
    "regression": "mse",
    "multilabel": "bce",
}
"""The loss of each kind of task, unless one is given."""
OWN = "model"
"""The name of the loss that the model computes itself, as Hugging Face models do where the inputs have labels."""


def named_loss(name: str, task: str, specials: tuple[int, ...]) -> Loss:
    """Return a built-in loss.

    Raises:
        KeelError: It does not suit the kind of task.
    """
    entry = LOSSES[name]
    if task not in entry.tasks:
        suited = [other for other, candidate in LOSSES.items() if task in candidate.tasks]
        raise KeelError(
            f"local.loss = {name!r} requires targets for {' or '.join(sorted(entry.tasks))}, but these are targets for "
            f"{task}; use {' or '.join(repr(other) for other in suited)}, or name the task of the data"
        )
    return entry.make(specials)


@dataclass(frozen=True)
class MeanOfMinibatch:
    """A loss that returns the mean over a minibatch, as one equal loss per example."""

    wrapped: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.wrapped(outputs, targets).expand(len(targets))


@dataclass(frozen=True)
class MeanOfElements:
    """A loss that returns a loss per element, as the mean of each example."""

    wrapped: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _mean(self.wrapped(outputs, targets))


def one_per_example(loss: Loss, outputs: Tensor, targets: Tensor) -> Loss:
    """Return the loss in the form of one loss per example, given outputs and targets of two examples.

    Raises:
        KeelError: It returns neither one loss per example, nor one per element, nor the mean of the minibatch.
    """
    outputs = outputs.detach()
    _check_broadcasting(loss, outputs, targets)
    losses: Any = loss(outputs, targets)
    if isinstance(losses, Tensor) and losses.shape[:1] == targets.shape[:1]:
        return loss if losses.dim() == 1 else MeanOfElements(loss)
    if isinstance(losses, Tensor) and losses.dim() == 0:
        repeated = loss(outputs[[0, 0]], targets[[0, 0]]), loss(outputs[:1], targets[:1])
        if abs(float(repeated[0] - repeated[1])) <= 1e-4 * abs(float(repeated[1])) + 1e-6:
            return MeanOfMinibatch(loss)
        raise KeelError(
            "loss must return one loss per example or the mean of the minibatch, not the sum; use reduction='none'"
        )
    returned = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
    raise KeelError(
        f"loss must return one loss per example, as with reduction='none', or their mean (got {returned} for "
        f"{len(targets)} examples)"
    )


def _check_broadcasting(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raise a KeelError if the loss compares every output with every target, as (n, 1) and (n) are broadcast."""
    if outputs.shape == targets.shape or outputs.numel() != targets.numel() or not targets.is_floating_point():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of some of these cases
        results = [loss(outputs[rows], targets[rows]) for rows in ([0, 1], [0], [1])]
    if not all(isinstance(result, Tensor) for result in results):
        return  # the caller reports it
    both, first, second = (result.mean() for result in results)
    if not torch.isclose(both, (first + second) / 2, rtol=1e-3, atol=1e-6):
        raise KeelError(
            f"loss broadcasts outputs of shape {tuple(outputs.shape[1:])} over targets of shape "
            f"{tuple(targets.shape[1:])}: it compares every output with every target; return outputs of the targets' "
            "shape from the model, or use a named loss such as 'mse'"
        )


def check_loss(loss: Any) -> None:
    """Raise a KeelError unless the object can be a loss: a function without parameters to train."""
    if not callable(loss):
        raise KeelError(f"loss must be a name or a function of outputs and targets (got {loss!r})")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise KeelError(
            f"loss {type(loss).__name__} has parameters, which would not be trained; make them part of the model"
        )
