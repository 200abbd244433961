"""Clipping of reports: the rule, what it applies to, equal results in every engine, and resume."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import keel
from keel.core import clipping
from keel.core.client import ClientResult
from keel.core.clipping import FACTOR, REJECTED, RoundClipping, euclidean_norm, median_norm
from keel.core.engine import Dropped, RoundWork, Workload
from keel.engines.serial import Serial
from tests.conftest import records_of, small_network, uneven_data, uneven_loop

ALGORITHMS = ["fedavg", "scaffold", "ghbm", "fedhbm", "fedcm", "mimemom"]
MODES = ["adaptive", 0.05]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the factor, so that honest reports are clipped too."""
    monkeypatch.setattr(clipping, "FACTOR", 1.2)


def result(values: Iterable[float], buffers: Tensor | None = None) -> ClientResult:
    return ClientResult({"delta": torch.tensor([*values])}, {}, 1, torch.tensor(0.0), buffers)


def clipped_norms(norms: list[float], recorded: dict[str, Tensor] | None = None) -> tuple[list[float], RoundClipping]:
    """The norms after adaptive clipping in round 1, or in round 2 after `recorded`."""
    clip = RoundClipping("adaptive", 2 if recorded else 1, 1, recorded or {})
    results = [*clip.results(range(len(norms)), [result([0.0, norm]) for norm in norms], None)]
    return [euclidean_norm(each.message["delta"]) for each in results], clip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_the_median_is_the_lower_one_of_the_positive_norms(norms: list[float]) -> None:
    positive = [norm for norm in norms if norm > 0]
    expected = statistics.median_low(positive) if positive else float("inf")
    assert median_norm([*norms, float("nan"), float("inf")]) == expected


@given(st.floats(1e-3, 1e3), st.integers(1, 8))
def test_one_large_report_is_bounded_by_the_norms_of_the_others_in_the_first_round(norm: float, others: int) -> None:
    norms, clip = clipped_norms([0.9 * REJECTED * norm] + [norm] * others)
    assert norms[0] == pytest.approx(FACTOR * norm, rel=1e-6)
    assert norms[1:] == pytest.approx([norm] * others, rel=1e-6)
    assert (clip.clipped, clip.rejected) == ({0}, {})


@given(st.floats(1e-3, 1e3), st.integers(2, 8))
def test_a_report_far_above_the_others_is_rejected_and_its_norm_not_recorded(norm: float, others: int) -> None:
    norms, clip = clipped_norms([1.1 * REJECTED * norm] + [norm] * others)
    assert norms == pytest.approx([norm] * others, rel=1e-6)
    assert (clip.clipped, {*clip.rejected}) == (set(), {0})
    assert clip.recorded["delta"][:, 1].tolist() == pytest.approx([norm] * others, rel=1e-6)


def test_a_rejected_norm_does_not_move_the_threshold_of_its_round() -> None:
    norms, clip = clipped_norms([1.0, 3.2, 1000.0])  # the median of all three is 3.2
    assert norms == pytest.approx([1.0, FACTOR])
    assert ({*clip.rejected}, clip.clipped) == ({2}, {1})


@pytest.mark.parametrize("norms", [[1.0, 1000.0], [0.001, 1.0], [1.0, 1.0, 1000.0, 1000.0]])
def test_half_of_a_cohort_is_never_rejected_but_clipped(norms: list[float]) -> None:
    """With two clients nobody can say which of them is the malicious one."""
    smallest = min(norms)
    clipped, clip = clipped_norms(norms)
    assert clipped == pytest.approx([min(norm, FACTOR * smallest) for norm in norms])
    assert clip.rejected == {}


def test_norms_that_change_for_all_clients_are_clipped_and_learned() -> None:
    """As at a jump of the learning rate."""
    recorded = clipped_norms([1.0, 1.0, 1.0])[1].recorded
    norms, clip = clipped_norms([1000.0, 1000.0, 1000.0], recorded)
    assert (norms, clip.rejected) == (pytest.approx([FACTOR] * 3), {})


def test_small_tensors_and_buffers_alone_do_not_reject_a_report() -> None:
    sent = torch.zeros(4)
    results = [
        ClientResult(
            {"delta": torch.tensor([0.0, 1.0]), "count": torch.tensor([far])}, {}, 1, torch.tensor(0.0), sent + far
        )
        for far in (1.0, 1.0, 1e6)
    ]
    clip = RoundClipping("adaptive", 1, 1, {})
    assert len(clip.results([0, 1, 2], results, sent)) == 3
    assert (clip.clipped, clip.rejected) == ({2}, {})


def test_a_cohort_of_one_is_clipped_only_once_norms_are_recorded() -> None:
    norms, first = clipped_norms([5.0])
    assert (norms, first.clipped) == ([5.0], set())
    assert clipped_norms([5000.0], first.recorded)[0] == pytest.approx([15.0])


def test_a_large_first_report_of_a_cohort_of_one_does_not_raise_the_next_threshold() -> None:
    _, first = clipped_norms([5000.0])
    _, second = clipped_norms([5.0], first.recorded)
    assert median_norm(second.recorded["delta"][:, 1].tolist()) == 5.0


def test_norms_are_recorded_as_clipped_and_forgotten_after_the_window() -> None:
    recorded: dict[str, Tensor] = {}
    for round in range(1, 14):
        clip = RoundClipping("adaptive", round, 1, recorded)
        list(clip.results([0, 1, 2], [result([0.0, norm]) for norm in (1.0, 1.0, 50.0)], None))
        recorded = clip.recorded
    assert sorted({*recorded["delta"][:, 1].tolist()}) == [1.0, FACTOR]
    assert {*recorded["delta"][:, 0].tolist()} == {*range(13 - clipping.WINDOW, 14)}


def test_reports_that_are_not_finite_or_zero_stay_as_they_are() -> None:
    norms, clip = clipped_norms([float("nan"), 1.0, float("inf"), 0.0])
    assert np.isnan(norms[0])
    assert (norms[1:], clip.clipped) == ([1.0, float("inf"), 0.0], set())


def test_a_number_clips_large_tensors_alone() -> None:
    clip = RoundClipping(0.5, 1, 2, {})
    message = {"delta": torch.full((3,), 2.0), "count": torch.tensor([9.0]), "blocks": torch.tensor([7.0, 8.0])}
    [clipped] = clip.results([4], [ClientResult(message, {}, 1, torch.tensor(0.0))], None)
    assert euclidean_norm(clipped.message["delta"]) == pytest.approx(0.5)
    assert {name: clipped.message[name].tolist() for name in ("count", "blocks")} == {"count": [9.0], "blocks": [7, 8]}
    assert (clip.norms, clip.clipped, clip.recorded) == ({4: pytest.approx(12**0.5)}, {4}, {})


def test_the_change_of_averaged_buffers_is_clipped() -> None:
    clip, sent = RoundClipping("adaptive", 1, 1, {}), torch.tensor([10.0, 10.0])
    changes = [1.0, 1.0, 1000.0]
    results = [result([0.0, 1.0], sent + torch.tensor([change, 0.0])) for change in changes]
    moved = [each.buffers for each in clip.results([0, 1, 2], results, sent)]
    assert [buffers.tolist() for buffers in moved if buffers is not None] == [[11, 10], [11, 10], [10 + FACTOR, 10]]


class Attacked(Serial):
    """Client 0 sends all its tensors times `factor` in the rounds 1, 4, 7, ..."""

    factor = 1.0

    def probe(self, work: RoundWork) -> Iterator[Any]:
        return iter([self._attacked(work, *each) for each in zip(work.cohort, super().probe(work), strict=True)])

    def train(self, work: RoundWork) -> Iterator[Any]:
        for client, result in zip(work.cohort, super().train(work), strict=True):
            yield replace(result, message=self._attacked(work, client, result.message))

    def _attacked(self, work: RoundWork, client: int, message: dict[str, Tensor]) -> dict[str, Tensor]:
        factor = self.factor if client == 0 and work.ctx.round % 3 == 1 else 1.0
        return {name: value * factor for name, value in message.items()}


class Oracle(Attacked):
    """Clips and rejects by the rule as it is written in the documentation, with NumPy and without records of the loop.

    The loop drops a rejected client as one that did not answer.
    """

    remote = True

    def __init__(self, workload: Workload, mode: Any):
        super().__init__(workload)
        self.mode, self.blocks = mode, len(self.model.sizes)
        self.past: dict[str, list[list[float]]] = {}

    def probe(self, work: RoundWork) -> Iterator[Any]:
        messages = [*super().probe(work)]
        far = self._clip("probe", messages)
        return iter([Dropped("far") if row in far else each for row, each in enumerate(messages)])

    def train(self, work: RoundWork) -> Iterator[Any]:
        results = [*super().train(work)]
        far = self._clip("report", [each.message for each in results])
        return iter([Dropped("far") if row in far else each for row, each in enumerate(results)])

    def _clip(self, phase: str, messages: list[dict[str, Tensor]]) -> set[int]:
        def norm(message: dict[str, Tensor], name: str) -> float:
            return float(np.linalg.norm(message[name].numpy().astype(np.float64)))

        def median(name: str, rows: list[int]) -> float:
            past = [each for round in self.past.get(phase + name, [])[-10:] for each in round]
            known = sorted(each for each in [*past, *(norm(messages[row], name) for row in rows)] if each > 0)
            return known[(len(known) - 1) // 2]

        rows, far = [*range(len(messages))], set[int]()
        large = [name for name in messages[0] if messages[0][name].numel() > self.blocks]
        if self.mode == "adaptive":
            far = {row for row in rows for name in large if norm(messages[row], name) > 100 * median(name, rows)}
        far = far if len(far) < len(rows) / 2 else set()
        rows = [row for row in rows if row not in far]
        for name in messages[0] if self.mode == "adaptive" else large:
            limit = 1.2 * median(name, rows) if self.mode == "adaptive" else self.mode
            norms = {row: norm(messages[row], name) for row in rows}
            self.past.setdefault(phase + name, []).append([min(each, limit) for each in norms.values()])
            for row in rows:
                if norms[row] > limit:
                    array = messages[row][name].numpy().astype(np.float64)
                    messages[row][name] = torch.from_numpy((array * (limit / norms[row])).astype(np.float32))
        return far


def table(algorithm: str, mode: Any) -> dict[str, Any]:
    server = {"clip": mode, "largest_weight": 0.4}
    return {"algorithm": {"name": algorithm}, "rounds": 13, "server": server, "engine": {"name": "serial"}}


def compare_with_oracle(algorithm: str, mode: Any) -> list[Any]:
    """Train with the clipping of the loop and with that of the oracle; return the records of the former."""
    loop = uneven_loop(table(algorithm, mode))
    loop.engine = Attacked(Workload(loop.task, loop.local))
    state, records = loop.start(), list[Any]()
    loop.run(state, [lambda record, state, seconds: records.append(record)])
    plain = uneven_loop({**table(algorithm, mode), "server": {"largest_weight": 0.4}})
    plain.engine = Oracle(Workload(plain.task, plain.local), mode)
    expected = plain.start()
    plain.run(expected)
    torch.testing.assert_close(state.server["theta"], expected.server["theta"], atol=1e-5, rtol=1e-4)
    return records


@pytest.mark.parametrize(
    ("algorithm", "mode"), [*((name, mode) for name in ALGORITHMS for mode in MODES), ("fedexp", "adaptive")]
)
def test_the_loop_clips_by_the_documented_rule(algorithm: str, mode: Any, often: None) -> None:
    records = compare_with_oracle(algorithm, mode)
    assert any("clipped" in record for record in records)
    assert all(len(record["norms"]) == len(record["cohort"]) for record in records)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedhbm", "mimemom"])
def test_the_loop_rejects_by_the_documented_rule(algorithm: str, often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attacked, "factor", -1e4)
    records = compare_with_oracle(algorithm, "adaptive")
    rejected = [record for record in records if "rejected" in record]
    assert [record["round"] for record in rejected] == [1, 4, 7]  # in rounds 10 and 13 client 0 is idle
    for record in rejected:
        assert record["rejected"] == [0]
        assert record["dropped"]["0"].startswith("rejected: the norm of ")
        assert 0 not in record["cohort"]
        assert record["train_loss"] is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ["scaffold", "mimemom"])
def test_pool_has_the_bits_of_serial_and_cohort_its_values(algorithm: str, mode: Any, often: None) -> None:
    states = {}
    for engine in ("serial", "pool", "cohort"):
        loop = uneven_loop({**table(algorithm, mode), "engine": {"name": engine, "workers": 2}, "rounds": 5})
        states[engine] = loop.start()
        loop.run(states[engine])
    assert torch.equal(states["serial"].server["theta"], states["pool"].server["theta"])
    torch.testing.assert_close(states["serial"].server["theta"], states["cohort"].server["theta"], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("algorithm", ["scaffold", "mimemom"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(algorithm: str, tmp_path: Path, often: None) -> None:
    spec = {**table(algorithm, "adaptive"), "participation": {"rate": 0.5}, "local": {"epochs": 2, "batch": 4}}
    given: dict[str, Any] = {"model": small_network(), "data": uneven_data()}
    whole, calls = keel.run(spec, out=tmp_path / "whole", **given), iter([False, False, True])
    assert keel.run(spec, out=tmp_path / "run", stop=lambda: next(calls, False), **given).status == "interrupted"
    resumed = keel.resume(tmp_path / "run", **given)
    assert any("clipped" in record for record in whole.records[3:])
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert resumed.records == whole.records


def test_without_clipping_reports_are_neither_held_nor_measured() -> None:
    loop, held = uneven_loop({"engine": {"name": "serial"}, "rounds": 1}), list[str]()
    train = loop.engine.train

    def watched(work: RoundWork) -> Iterator[Any]:
        for each in train(work):
            held.append("trained")
            yield each

    loop.engine.train = watched  # type: ignore[method-assign]
    aggregate = type(loop.algorithm).aggregate

    def streamed(self: Any, server: Any, reports: Any, ctx: Any) -> Any:
        def each() -> Iterator[Any]:
            for report in reports:
                held.append("aggregated")
                yield report

        return aggregate(self, server, each(), ctx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loop.algorithm), "aggregate", streamed)
        [record] = records_of(loop)
    assert held[:4] == ["trained", "aggregated"] * 2
    assert "norms" not in record
