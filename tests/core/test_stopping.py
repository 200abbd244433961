"""The rules of early stopping and model selection, each against a naive second implementation over all records."""

from math import isfinite
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from keel.core.records import PrimaryMetric, Record
from keel.core.selection import KeepBest, kept_best
from keel.core.stopping import EarlyStopping, StopRules
from keel.core.training_state import TrainingState

ACCURACY = PrimaryMetric()
LOSS = PrimaryMetric("test_loss", maximize=False)
MISSING = "not evaluated"

values = st.one_of(st.just(MISSING), st.none(), st.just(float("nan")), st.sampled_from([k / 10 for k in range(11)]))
histories = st.lists(st.tuples(values, st.integers(0, 50)), max_size=15)
rules = st.builds(
    StopRules,
    target=st.none() | st.sampled_from([k / 10 for k in range(11)]),
    patience=st.none() | st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.15]),
    seconds=st.none() | st.integers(1, 200),
    bytes=st.none() | st.integers(1, 400),
)
primaries = st.sampled_from([ACCURACY, LOSS])


def records_with(history: list[tuple[Any, int]], primary: PrimaryMetric) -> list[Record]:
    """Records with a value of the primary metric and a number of bytes."""
    return [
        {"round": t, "bytes_down": sent // 2, "bytes_up": sent - sent // 2}  # type: ignore[misc]
        | ({} if value == MISSING else {primary.name: value})
        for t, (value, sent) in enumerate(history, start=1)
    ]


def naive_stop_round(history: list[tuple[Any, int]], rules: StopRules, primary: PrimaryMetric) -> int | None:
    """Judge each round from all rounds up to it; a round that sends 8 bytes takes a second."""
    for t in range(1, len(history) + 1):
        seen = history[:t]
        evaluated = [value for value, _ in seen if value != MISSING]
        scores = [None if v is None or not isfinite(v) else (v if primary.maximize else -v) for v in evaluated]
        now = scores[-1] if scores and seen[-1][0] != MISSING else None
        sent = sum(bytes for _, bytes in seen)
        target = None if rules.target is None else rules.target if primary.maximize else -rules.target
        if target is not None and now is not None and now >= target:
            return t
        if rules.bytes is not None and sent >= rules.bytes:
            return t
        if rules.seconds is not None and sum(bytes / 8 for _, bytes in seen) >= rules.seconds:
            return t
        best, best_at = None, 0
        for position, score in enumerate(scores, start=1):
            if score is not None and (best is None or score > best + rules.min_delta):
                best, best_at = score, position
        if rules.patience is not None and seen[-1][0] != MISSING and len(scores) - best_at >= rules.patience:
            return t
    return None


def follow(stopping: EarlyStopping, records: list[Record]) -> int | None:
    """The round after which the rules stop a run with these records."""
    for record in records:
        if stopping.reason is not None:
            return record["round"] - 1
        stopping.count_cost(record, (record["bytes_down"] + record["bytes_up"]) / 8)
        stopping.count_evaluation(record)
    return records[-1]["round"] if records and stopping.reason is not None else None


@given(histories, rules, primaries)
@example([(0.5, 1), (0.6, 1), (0.5, 1)], StopRules(patience=2, min_delta=0.15), ACCURACY)
@example([(0.5, 1), (0.4, 1), (0.4, 1)], StopRules(patience=1), LOSS)
def test_a_run_stops_in_the_first_round_in_which_a_rule_holds(
    history: list[tuple[Any, int]], rules: StopRules, primary: PrimaryMetric
) -> None:
    stopped = follow(EarlyStopping(rules, primary), records_with(history, primary))
    assert stopped == naive_stop_round(history, rules, primary)


@given(histories, rules, primaries, st.integers(0, 15))
def test_a_resumed_run_stops_in_the_same_round(
    history: list[tuple[Any, int]], rules: StopRules, primary: PrimaryMetric, resumed: int
) -> None:
    """The rules restore their counts from the records, in which a value that is not finite is None."""
    records = records_with(history, primary)
    expected = naive_stop_round(history, rules, primary)
    before = [
        {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in record.items()}
        for record in records[: min(resumed, expected or len(history))]
    ]
    seconds = [(record["bytes_down"] + record["bytes_up"]) / 8 for record in before]  # type: ignore[operator]
    again = EarlyStopping(rules, primary, before, seconds)  # type: ignore[arg-type]
    stopped = len(before) if again.reason else follow(again, records[len(before) :])
    assert stopped == expected


def test_a_run_without_rules_never_stops() -> None:
    stopping = EarlyStopping()
    assert follow(stopping, records_with([(0.5, 10**12)] * 50, ACCURACY)) is None
    assert stopping.reason is None


def test_the_reason_names_the_rule() -> None:
    def reason(primary: PrimaryMetric = ACCURACY, **fields: Any) -> str | None:
        stopping = EarlyStopping(StopRules(**fields), primary)
        follow(stopping, records_with([(0.5, 1600)] * 4, primary))
        return stopping.reason

    assert reason(target=0.5) == "accuracy reached 0.5"
    assert reason(LOSS, patience=2) == "no improvement of test_loss in 2 evaluations"
    assert reason(patience=1) == "no improvement of accuracy in 1 evaluation"
    assert reason(seconds=300) == "the budget of 300 s is used up"
    assert reason(bytes=3000) == "the budget of 3.0 kB is used up"


@given(histories, primaries)
def test_the_best_model_is_the_first_of_those_with_the_best_value(
    history: list[tuple[Any, int]], primary: PrimaryMetric
) -> None:
    state = TrainingState(0, {})
    keep = KeepBest(primary)
    for record in records_with(history, primary):
        state.round, state.server["theta"] = record["round"], torch.tensor([float(record["round"])])
        state.buffers = 2 * state.server["theta"]
        keep.round_recorded(record, state, 0.0)
        state.server["theta"].zero_()  # the kept model is a copy
        state.buffers.zero_()
    known = [(v, t) for t, (v, _) in enumerate(history, start=1) if isinstance(v, float) and isfinite(v)]
    best = kept_best(state.observed)
    if not known:
        assert best is None
        return
    value, t = min(known, key=lambda pair: (-pair[0] if primary.maximize else pair[0], pair[1]))
    assert best is not None
    assert (best.round, best.value) == (t, value)
    assert best.theta.tolist() == [t]
    assert best.buffers is not None
    assert best.buffers.tolist() == [2 * t]
