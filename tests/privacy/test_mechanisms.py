"""Each privacy mechanism and robust mean against a naive second implementation, and the distribution of the noise."""

from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from keel.algorithms.base import Context, Message, Report
from keel.core.mechanisms import Sender, ServerRound
from keel.core.randomness import keyed_rng
from keel.privacy.central import CLIP, AdaptiveClip, PrivateMean, _nodes
from keel.privacy.clipping import ClipReport, clipped, joint_norm
from keel.privacy.noise import keyed_noise
from keel.privacy.robust import RobustMean, geometric_median, median, trimmed_mean

CTX = Context(round=1, clients=10, cohort=2, share=0.2, period=5.0, lr=0.1, server_lr=1.0)


def at(example: Message, round: int = 1, state: Message | None = None, seed: int = 0) -> ServerRound:
    ctx = Context(**{**vars(CTX), "round": round})
    return ServerRound(ctx, [], example, state or {}, seed)


def reports(*vectors: list[float]) -> list[Report]:
    return [Report({"delta": torch.tensor(vector)}, 1 / len(vectors), 1) for vector in vectors]


def zeros(count: int) -> Message:
    return {"delta": torch.zeros(count)}


def test_a_report_is_clipped_in_the_norm_of_all_its_tensors() -> None:
    message = {"delta": torch.tensor([3.0, 0.0]), "control": torch.tensor([4.0])}
    assert joint_norm(clipped(message, 1.0)) == pytest.approx(1.0)
    assert clipped(message, 1.0)["control"].item() == pytest.approx(0.8)
    assert clipped(message, 5.1) is message
    broken = {"delta": torch.tensor([float("nan"), 1.0]), "control": torch.tensor([1.0])}
    assert joint_norm(clipped(broken, 1.0)) == 0.0


@pytest.mark.parametrize("tree", [None, 4])
def test_the_noise_of_the_mean_is_gaussian_with_the_declared_scale(tree: int | None) -> None:
    mean = PrivateMean(clip=2.0, noise=1.5, cohort=10.0, tree=tree)
    drawn = mean.mean([], at(zeros(100_000))).message["delta"].numpy()
    assert stats.kstest(drawn / (1.5 * 2.0 / 10), "norm").pvalue > 0.001
    assert not torch.equal(torch.from_numpy(drawn), mean.mean([], at(zeros(100_000), round=2)).message["delta"])
    assert np.array_equal(drawn, mean.mean([], at(zeros(100_000))).message["delta"].numpy())


def test_the_noise_of_a_client_is_gaussian_and_keyed_by_client_and_round() -> None:
    mechanism = ClipReport(clip=0.5, noise=2.0)
    drawn = [
        mechanism.encode(zeros(100_000), {}, Sender(0, round, client))[0]["delta"].numpy()
        for round, client in ((1, 1), (1, 2), (2, 1))
    ]
    assert stats.kstest(drawn[0], "norm", args=(0, 1.0)).pvalue > 0.001
    assert abs(np.corrcoef(drawn)[0, 1:]).max() < 0.02


@pytest.mark.parametrize(("relation", "sensitivity"), [("removed", 1.0), ("replaced", 2.0)])
def test_the_noise_covers_the_largest_change_that_a_client_can_make(relation: str, sensitivity: float) -> None:
    """The adversarial pair: a client with an arbitrarily long report against its absence or its opposite."""
    clip, cohort, mean = 3.0, 2.0, PrivateMean(clip=3.0, noise=0.0, cohort=2.0)
    with_client = mean.mean(reports([1.0, 2.0], [1e6, 0.0]), at(zeros(2))).message["delta"]
    other = [[1.0, 2.0]] if relation == "removed" else [[1.0, 2.0], [-1e6, 0.0]]
    without = mean.mean(reports(*other), at(zeros(2))).message["delta"]
    change = float((with_client - without).norm())
    assert change == pytest.approx(sensitivity * clip / cohort, rel=1e-6)
    noisy = PrivateMean(clip=clip, noise=1.0, cohort=cohort)
    scale = noisy.mean([], at(zeros(100_000))).message["delta"].std()
    assert float(scale) == pytest.approx(clip / cohort, rel=0.02)  # noise multiplier 1: one norm of one client


def test_the_denominator_is_the_expected_cohort_whoever_takes_part() -> None:
    mean = PrivateMean(clip=10.0, noise=0.0, cohort=4.0)
    assert mean.mean(reports([2.0], [4.0]), at(zeros(1))).message["delta"].item() == pytest.approx(1.5)
    assert mean.mean([], at(zeros(1))).message["delta"].item() == 0.0


def test_the_adaptive_norm_follows_the_quantile() -> None:
    adaptive = AdaptiveClip(quantile=0.5, lr=0.2, bit_noise=1e-9)
    taken = PrivateMean(1.0, 0.0, 4.0, adaptive).mean(reports([0.5], [2.0], [3.0], [4.0]), at(zeros(1)))
    assert float(taken.state[CLIP]) == pytest.approx(1.0 * exp(-0.2 * (1 / 4 - 0.5)))
    assert taken.recorded == {"clip_norm": 1.0}
    norms, clip = np.linspace(0.1, 2.0, 20), 10.0
    for round in range(1, 100):
        state = {CLIP: torch.tensor(clip, dtype=torch.float64)}
        taken = PrivateMean(1.0, 0.0, 20.0, adaptive).mean(reports(*([n] for n in norms)), at(zeros(1), round, state))
        clip = float(taken.state[CLIP])
    assert clip == pytest.approx(np.median(norms), rel=0.1)


def test_the_noise_on_the_bits_has_the_declared_scale() -> None:
    adaptive = AdaptiveClip(quantile=0.5, lr=1.0, bit_noise=3.0)
    mean = PrivateMean(1.0, 0.0, 10.0, adaptive)
    logs = [np.log(float(mean.mean([], at(zeros(1), round)).state[CLIP])) for round in range(1, 2001)]
    assert stats.kstest(-np.array(logs) / 0.3, "norm").pvalue > 0.001


def prefix_noise(restart: int, steps: int, size: int) -> torch.Tensor:
    """The noise of the sum of the first steps of a tree, as the binary mechanism is written: after step t, the node
    that t completes replaces the complete nodes below it, and the sum over the remaining nodes is released."""
    nodes: dict[int, torch.Tensor] = {}
    for t in range(1, steps + 1):
        level = (t & -t).bit_length() - 1
        drawn = keyed_noise(keyed_rng(0, "privacy tree", restart, level, (t >> level) - 1))(torch.empty(size))
        nodes = {above: noise for above, noise in nodes.items() if above > level} | {level: drawn}
    return sum(nodes.values(), torch.zeros(size))


@pytest.mark.parametrize("restart", [7, 8, 13])
def test_tree_noise_is_that_of_the_binary_mechanism(restart: int) -> None:
    mean = PrivateMean(clip=2.0, noise=1.5, cohort=10.0, tree=restart)
    total, finished = torch.zeros(1000), torch.zeros(1000)
    for round in range(1, 2 * restart + 1):
        total = total + mean.mean([], at(zeros(1000), round)).message["delta"] * 10 / (2.0 * 1.5)
        tree, step = divmod(round - 1, restart)
        torch.testing.assert_close(total, finished + prefix_noise(tree, step + 1, 1000), atol=1e-4, rtol=0)
        if step + 1 == restart:
            finished = total


def test_the_noise_of_a_prefix_has_the_variance_of_its_binary_digits() -> None:
    noise = PrivateMean(1.0, 1.0, 1.0, tree=13)
    total = sum(noise.mean([], at(zeros(20_000), round)).message["delta"] for round in range(1, 12))
    assert float(total.square().mean()) == pytest.approx((11).bit_count(), rel=0.05)  # type: ignore[union-attr]


def test_the_nodes_of_a_prefix_cover_it_once() -> None:
    for steps in range(1, 65):
        covered = [i for level, number in _nodes(steps) for i in range(number << level, (number + 1) << level)]
        assert sorted(covered) == list(range(steps))


def test_the_median_and_the_trimmed_mean_are_those_of_numpy_and_scipy() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 4, 5, 10, 11):
        values = rng.standard_normal((count, 6)).astype(np.float32)
        held = reports(*values.tolist())
        assert np.allclose(median(held)["delta"], np.median(values, axis=0), atol=1e-6)
    values = rng.standard_normal((10, 6)).astype(np.float32)
    expected = stats.trim_mean(values, 0.2, axis=0)
    assert np.allclose(trimmed_mean(reports(*values.tolist()), 0.2)["delta"], expected, atol=1e-6)


def test_the_geometric_median_minimises_the_sum_of_distances() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((7, 3)).astype(np.float32)
    values[0] = 1000
    found = geometric_median(reports(*values.tolist()))["delta"].numpy()

    def cost(point: np.ndarray) -> float:
        return float(np.linalg.norm(values - point, axis=1).sum())

    from scipy.optimize import minimize

    naive = minimize(cost, np.median(values, axis=0), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-9}).x
    assert np.allclose(found, naive, atol=1e-2)
    same = reports([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    assert torch.allclose(geometric_median(same)["delta"], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("take", [median, lambda held: trimmed_mean(held, 0.4), geometric_median])
@pytest.mark.parametrize("length", [1e9, 1e30, float("inf"), float("nan")])
def test_two_of_five_cannot_move_a_robust_mean_however_long_their_reports(take: Any, length: float) -> None:
    honest = [[1.0, 1.0], [1.2, 0.8], [0.9, 1.1]]
    held = reports(*honest, [-length, length], [-length, -length])
    point = RobustMean(take).mean(held, at(zeros(2))).message["delta"]
    assert float((point - 1.0).abs().max()) <= 0.25


@pytest.mark.parametrize("take", [median, lambda held: trimmed_mean(held, 0.2), geometric_median])
def test_one_of_three_cannot_turn_a_robust_mean_around(take: object) -> None:
    held = reports([1.0, 1.0], [1.2, 0.8], [-1000.0, -1000.0])
    assert bool((take(held)["delta"] > 0.5).all())  # type: ignore[operator]
