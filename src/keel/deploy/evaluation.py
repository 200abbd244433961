"""Evaluation at the sites: each site measures the model on its test examples, and the server adds the sums up."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from flwr.app import MetricRecord
from torch import Tensor

from keel.core.evaluation import Evaluator
from keel.deploy.invalid_reply import InvalidReply
from keel.deploy.messages import read_integer, read_loss


class SiteEvaluator(Evaluator):
    """Evaluator whose parts are the sites' measurements; each site weighs as much as it has test examples."""

    bytes_sent = 0
    """Bytes sent to the sites for the last evaluation."""
    missing: Sequence[int] = ()
    """Sites with test examples whose last evaluation is missing."""

    def quality(self, measured: Iterable[Tensor]) -> dict[str, Any]:
        """Return test loss and accuracy over the sites that replied, with the number of examples behind them.

        The result has neither if no site that replied has test examples, and names the sites that are missing.
        """
        parts = list(measured)
        loss, correct, labelled, examples = sum(parts, torch.zeros(4, dtype=torch.float64)).tolist()
        missing = {"evaluation_missing": list(self.missing)} if self.missing else {}
        if not examples:
            return missing
        accuracy = {"accuracy": correct / labelled} if labelled else {}
        counts = {"bytes_evaluation": self.bytes_sent, "test_examples": int(examples)}
        return {"test_loss": loss / examples, **accuracy, **counts, **missing}


def read_measurement(numbers: MetricRecord, declared: int, targets_per_example: int, non_negative_loss: bool) -> Tensor:
    """Return a site's measurement: the sum of its losses, and its numbers of correct targets, targets and examples.

    Args:
        declared: The number of test examples that the site stated when it joined.
        targets_per_example: An upper bound on the targets of one example: 1, or the length of a sequence.
        non_negative_loss: Whether the loss cannot be negative, as cross entropy.
    """
    correct, labelled, examples = (read_integer(numbers, name) for name in ("correct", "labelled", "examples"))
    if not correct <= labelled <= examples * targets_per_example:
        raise InvalidReply(f"reports {correct} correct of {labelled} targets in {examples} examples")
    if examples != declared:
        raise InvalidReply(f"reports {examples} test examples, but the site joined with {declared}")
    loss = read_loss(numbers, examples * targets_per_example, non_negative_loss)
    return torch.tensor([loss, correct, labelled, examples], dtype=torch.float64)
