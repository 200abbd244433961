"""Early stopping: rules that end a run before its last round, judged from its records."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from keel.core.records import PrimaryMetric, Record
from keel.units import size


@dataclass(frozen=True)
class StopRules:
    """When a run stops. The first rule that holds stops it; a rule that is None never holds."""

    target: float | None = None
    """The primary metric is at least as good as this value in an evaluation."""
    patience: int | None = None
    """The primary metric has not improved in this many evaluations in a row."""
    min_delta: float = 0.0
    """A value is an improvement if it is better than the best one by more than this."""
    seconds: float | None = None
    """The rounds have taken this much wall-clock time. The only rule that is not deterministic."""
    bytes: float | None = None
    """The server and the clients have sent this many bytes."""
    private_rounds: int | None = None
    """The privacy budget allows this many rounds."""


class EarlyStopping:
    """Follows a run round by round, and says why it stops.

    Args:
        rules: When the run stops.
        primary: The metric that `target` and `patience` are about.
        records: The rounds of a resumed run so far. From them it reaches the state that it had after them.
        seconds: The wall-clock time of these rounds.
    """

    def __init__(
        self,
        rules: StopRules | None = None,
        primary: PrimaryMetric | None = None,
        records: Iterable[Record] = (),
        seconds: Iterable[float] = (),
    ):
        self.rules, self.primary = rules or StopRules(), primary or PrimaryMetric()
        self.reason: str | None = None
        """Why the run stops; None as long as no rule holds."""
        self.bytes, self.seconds = 0, sum(seconds)
        self.best: float | None = None
        self.without_improvement = 0
        """Evaluations since the best value."""
        for record in records:
            self.count_cost(record)
            self.count_evaluation(record)

    def count_cost(self, record: Record, seconds: float = 0.0) -> None:
        """Count the bytes and the wall-clock time of a round, without its evaluation."""
        self.bytes += record["bytes_down"] + record["bytes_up"]
        if self.rules.bytes is not None and self.bytes >= self.rules.bytes:
            self._stop(f"the budget of {size(self.rules.bytes)} is used up")
        if self.rules.private_rounds is not None and record["round"] >= self.rules.private_rounds:
            self._stop(f"the privacy budget is used up (epsilon {record['epsilon']:.3g})")
        self._count_seconds(seconds)

    def count_evaluation(self, record: Record, seconds: float = 0.0) -> None:
        """Compare the primary metric of a round with the target and the best value, if the round was evaluated.

        A value that is not finite counts as an evaluation without improvement.
        """
        if self.primary.name not in record:
            return
        self._count_seconds(seconds)
        value = cast(dict[str, Any], record)[self.primary.name]
        known = value is not None and isfinite(value)
        if known and self.rules.target is not None and self.primary.reached(value, self.rules.target):
            self._stop(f"{self.primary.name} reached {self.rules.target:g}")
        if known and self._improves(value):
            self.best, self.without_improvement = float(value), 0
        else:
            self.without_improvement += 1
        if self.rules.patience is not None and self.without_improvement >= self.rules.patience:
            evaluations = f"{self.rules.patience} evaluation{'s' * (self.rules.patience > 1)}"
            self._stop(f"no improvement of {self.primary.name} in {evaluations}")

    def _count_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        if self.rules.seconds is not None and self.seconds >= self.rules.seconds:
            self._stop(f"the budget of {self.rules.seconds:g} s is used up")

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        margin = self.rules.min_delta if self.primary.maximize else -self.rules.min_delta
        return self.primary.is_better(value, self.best + margin)

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
