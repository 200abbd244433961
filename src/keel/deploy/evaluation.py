"""Evaluation at the sites: each site measures the model on its test examples, and the server adds the sums up."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import MetricRecord
from torch import Tensor

from keel.core.evaluation import Evaluator
from keel.deploy.messages import InvalidReply, read_finite, read_integer


class SiteEvaluator(Evaluator):
    """Evaluator whose parts are the sites' measurements; each site weighs as much as it has test examples."""

    bytes_sent = 0
    """Bytes sent to the sites for the last evaluation."""

    def quality(self, measured: Iterable[Tensor]) -> dict[str, Any]:
        """Return test loss and accuracy over all sites, or nothing if no site has test examples."""
        parts = list(measured)
        loss, correct, labelled, examples = sum(parts, torch.zeros(4, dtype=torch.float64)).tolist()
        if not examples:
            return {}
        accuracy = {"accuracy": correct / labelled} if labelled else {}
        return {"test_loss": loss / examples, **accuracy, "bytes_evaluation": self.bytes_sent}


def read_measurement(numbers: MetricRecord, targets_per_example: int, non_negative_loss: bool) -> Tensor:
    """Return a site's measurement: the sum of its losses, and its numbers of correct targets, targets and examples.

    Args:
        targets_per_example: An upper bound on the targets of one example: 1, or the length of a sequence.
        non_negative_loss: Whether the loss cannot be negative, as cross entropy.
    """
    loss = read_finite(numbers, "loss")
    correct, labelled, examples = (read_integer(numbers, name) for name in ("correct", "labelled", "examples"))
    if not correct <= labelled <= examples * targets_per_example:
        raise InvalidReply(f"reports {correct} correct of {labelled} targets in {examples} examples")
    if loss < 0 and non_negative_loss:
        raise InvalidReply(f"loss is {loss:g}, but cross entropy is never negative")
    return torch.tensor([loss, correct, labelled, examples], dtype=torch.float64)
