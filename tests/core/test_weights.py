"""The cap on the weights of a cohort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.core.weights import capped
from tests.conftest import uneven_loop

sizes = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)
caps = st.floats(0.01, 1.0)


def weights_of(sizes: list[int]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


@given(sizes, caps)
def test_capped_weights_sum_to_one_keep_their_order_and_do_not_exceed_the_cap(sizes: list[int], cap: float) -> None:
    given, result = weights_of(sizes), capped(weights_of(sizes), cap)
    assert sum(result) == pytest.approx(1)
    assert max(result) <= max(cap, 1 / len(sizes))
    assert all(result[i] <= result[j] for i in range(len(given)) for j in range(len(given)) if given[i] <= given[j])


@given(sizes, caps)
def test_weights_below_the_cap_are_unchanged(sizes: list[int], cap: float) -> None:
    given = weights_of(sizes)
    if max(given) <= cap:
        assert capped(given, cap) == given
    assert capped(given, 1.0) == given


@given(sizes, caps)
def test_clients_below_the_cap_keep_their_proportions(sizes: list[int], cap: float) -> None:
    given, result = weights_of(sizes), capped(weights_of(sizes), cap)
    if len(sizes) * cap > 1:
        ratios = [new / old for new, old in zip(result, given, strict=True) if new < cap]
        assert ratios == pytest.approx([ratios[0]] * len(ratios)) if ratios else sum(result) == pytest.approx(1)


@pytest.mark.parametrize(
    ("given", "cap", "expected"),
    [
        ([0.8, 0.15, 0.05], 0.5, [0.5, 0.375, 0.125]),
        ([0.8, 0.15, 0.05], 0.4, [0.4, 0.4, 0.2]),  # the share of the excess lifts the second above the cap
        ([0.9, 0.1], 0.5, [0.5, 0.5]),
        ([0.9, 0.1], 0.1, [0.5, 0.5]),
        ([1.0], 0.5, [1.0]),
    ],
)
def test_the_excess_is_shared_in_proportion(given: list[float], cap: float, expected: list[float]) -> None:
    assert capped(given, cap) == pytest.approx(expected)


def test_the_weights_of_a_round_are_capped_in_a_loop() -> None:
    loop = uneven_loop({"server": {"largest_weight": 0.3}})
    everyone = np.arange(loop.sampler.clients)
    free = uneven_loop({}).participation.weights(everyone)
    assert max(free) > 0.3
    assert loop.participation.weights(everyone) == capped(free, 0.3)
