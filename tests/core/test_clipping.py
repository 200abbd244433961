"""Clipping of reports: the rule, what it applies to, equal results in every engine, and resume."""

import statistics
from collections.abc import Iterable, Iterator
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
from keel.core.clipping import FACTOR, RoundClipping, adaptive_threshold, euclidean_norm
from keel.core.engine import RoundWork, Workload
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
def test_the_threshold_is_a_multiple_of_the_lower_median_of_the_positive_norms(norms: list[float]) -> None:
    positive = [norm for norm in norms if norm > 0]
    expected = FACTOR * statistics.median_low(positive) if positive else float("inf")
    assert adaptive_threshold([*norms, float("nan"), float("inf")]) == expected


@given(st.floats(1e-3, 1e3), st.integers(1, 8))
def test_one_large_report_is_bounded_by_the_norms_of_the_others_in_the_first_round(norm: float, others: int) -> None:
    norms, clip = clipped_norms([1000 * norm] + [norm] * others)
    assert norms[0] == pytest.approx(FACTOR * norm, rel=1e-6)
    assert norms[1:] == pytest.approx([norm] * others, rel=1e-6)
    assert clip.clipped == {0}


def test_a_cohort_of_one_is_clipped_only_once_norms_are_recorded() -> None:
    norms, first = clipped_norms([5.0])
    assert (norms, first.clipped) == ([5.0], set())
    assert clipped_norms([5000.0], first.recorded)[0] == pytest.approx([15.0])


def test_a_large_first_report_of_a_cohort_of_one_does_not_raise_the_next_threshold() -> None:
    _, first = clipped_norms([5000.0])
    _, second = clipped_norms([5.0], first.recorded)
    assert adaptive_threshold(second.recorded["delta"][:, 1].tolist()) == FACTOR * 5.0


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


class Oracle(Serial):
    """Clips by the rule as it is written in the documentation, with NumPy and without records of the loop."""

    def __init__(self, workload: Workload, mode: Any):
        super().__init__(workload)
        self.mode, self.blocks = mode, len(self.model.sizes)
        self.past: dict[str, list[list[float]]] = {}

    def probe(self, work: RoundWork) -> Iterator[dict[str, Tensor]]:
        messages = [*super().probe(work)]
        self._clip("probe", messages)
        return iter(messages)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        results = [*super().train(work)]
        self._clip("report", [each.message for each in results])
        return iter(results)

    def _clip(self, phase: str, messages: list[dict[str, Tensor]]) -> None:
        for name in messages[0]:
            arrays = [message[name].numpy().astype(np.float64) for message in messages]
            if self.mode != "adaptive" and arrays[0].size <= self.blocks:
                continue
            past, norms = self.past.setdefault(phase + name, []), [float(np.sqrt((a * a).sum())) for a in arrays]
            known = sorted([norm for round in past[-10:] for norm in round] + norms)
            known = [norm for norm in known if norm > 0]
            limit = 1.2 * known[(len(known) - 1) // 2] if self.mode == "adaptive" else self.mode
            past.append([min(norm, limit) for norm in norms])
            for message, array, norm in zip(messages, arrays, norms, strict=True):
                if norm > limit:
                    message[name] = torch.from_numpy((array * (limit / norm)).astype(np.float32))


def table(algorithm: str, mode: Any) -> dict[str, Any]:
    server = {"clip": mode, "largest_weight": 0.4}
    return {"algorithm": {"name": algorithm}, "rounds": 13, "server": server, "engine": {"name": "serial"}}


@pytest.mark.parametrize(
    ("algorithm", "mode"), [*((name, mode) for name in ALGORITHMS for mode in MODES), ("fedexp", "adaptive")]
)
def test_the_loop_clips_by_the_documented_rule(algorithm: str, mode: Any, often: None) -> None:
    loop = uneven_loop(table(algorithm, mode))
    state, records = loop.start(), list[Any]()
    loop.run(state, [lambda record, state, seconds: records.append(record)])
    assert any("clipped" in record for record in records)
    assert all(len(record["norms"]) == len(record["cohort"]) for record in records)
    plain = uneven_loop({**table(algorithm, mode), "server": {"largest_weight": 0.4}})
    plain.engine = Oracle(Workload(plain.task, plain.local), mode)
    expected = plain.start()
    plain.run(expected)
    torch.testing.assert_close(state.server["theta"], expected.server["theta"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedhbm", "mimemom"])
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
