"""The cost of reaching FedAvg's final accuracy: the paper's Table 4, from the numbers of keel.report.

keel.report measures the rounds, bytes and seconds until a method first reaches the target, by the same rule for every
method. A method that never reaches it costs all its rounds, and a saving is relative to what FedAvg spends until it
reaches its own final accuracy. The paper charges FedAvg for all its rounds instead, so its printed savings are larger.
"""

from dataclasses import dataclass

from keel.paper.results import Row


@dataclass(frozen=True)
class TargetCost:
    """What a method spends until it first reaches the target."""

    reached: bool
    share: float
    """Rounds until the target as a share of all rounds; 1 if it is never reached."""
    bytes: float
    seconds: float | None
    bytes_saved: float
    """1 - bytes / FedAvg's bytes: positive for a reduction, negative for an increase."""
    seconds_saved: float | None
    relative_round: float
    """Bytes of a round relative to FedAvg's."""


def target_costs(part: Row) -> list[TargetCost | None]:
    """Return the cost of each row of a part, or None for a row without runs or without a baseline."""
    baseline = next((row for row in part["rows"] if row.get("cost") and row["algorithm"] == "fedavg"), None)
    if baseline is None:
        return [None for _ in part["rows"]]
    return [_cost(row, baseline, part["rounds"]) if row.get("cost") else None for row in part["rows"]]


def _cost(row: Row, baseline: Row, rounds: int) -> TargetCost:
    spent, baseline_spent = _spent(row, "bytes"), _spent(baseline, "bytes")
    seconds, baseline_seconds = _spent(row, "seconds"), _spent(baseline, "seconds")
    assert spent is not None
    return TargetCost(
        reached=row["rounds_to_target"] is not None,
        share=(row["rounds_to_target"] or rounds) / rounds,
        bytes=spent,
        seconds=seconds,
        bytes_saved=1 - spent / baseline_spent if baseline_spent else 0.0,
        seconds_saved=1 - seconds / baseline_seconds if seconds is not None and baseline_seconds else None,
        relative_round=_total_bytes(row) / _total_bytes(baseline),
    )


def _spent(row: Row, name: str) -> float | None:
    """Return the bytes or seconds until the target, or of all rounds; None for seconds that are not stored."""
    return row["cost"][name] if row["rounds_to_target"] is None else row.get(f"{name}_to_target")


def _total_bytes(row: Row) -> float:
    return row["cost"]["bytes"] / row["cost"]["share"]
