"""Client samplers: cohort sizes, periods and distributions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keel.core.randomness import keyed_rng
from keel.core.sampling import Cyclic, Uniform, Weighted

populations = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
seeds = st.integers(0, 1000)


@given(populations, seeds, st.integers(1, 1000))
def test_a_uniform_cohort_has_the_given_number_of_distinct_clients(sizes: tuple[int, int], seed: int, t: int) -> None:
    clients, size = sizes
    cohort = Uniform(clients, size, seed).cohort(t)
    assert len(set(cohort.tolist())) == size
    assert cohort.min() >= 0
    assert cohort.max() < clients
    assert (cohort == Uniform(clients, size, seed).cohort(t)).all()


def test_uniform_sampling_takes_every_client_equally_often() -> None:
    counts = np.bincount(np.concatenate([Uniform(10, 3, 0).cohort(t) for t in range(1, 4001)]), minlength=10)
    assert abs(counts / 4000 - 0.3).max() < 0.03


@given(populations, seeds)
def test_cyclic_sampling_takes_every_client_once_per_period(sizes: tuple[int, int], seed: int) -> None:
    clients, size = sizes
    sampler = Cyclic(clients, size, seed)
    period = int(sampler.period)
    cycle = [sampler.cohort(t) for t in range(1, period + 1)]
    assert sorted(np.concatenate(cycle).tolist()) == list(range(clients))
    assert max(map(len, cycle)) <= size
    assert max(map(len, cycle)) - min(map(len, cycle)) <= 1
    for t in range(period + 1, 2 * period + 1):
        assert (sampler.cohort(t) == cycle[t - period - 1]).all()


def test_the_cyclic_order_is_shuffled_by_the_seed() -> None:
    assert Cyclic(20, 5, 0).cohort(1).tolist() != Cyclic(20, 5, 1).cohort(1).tolist()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_a_weighted_cohort_has_distinct_clients(weights: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(weights)))
    cohort = Weighted(size, np.array(weights), 0).cohort(1)
    assert len(set(cohort.tolist())) == size


def test_weighted_sampling_has_the_distribution_of_successive_draws() -> None:
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    sampler = Weighted(2, weights, 0)
    counts = np.zeros(4)
    for t in range(1, 8001):
        counts[sampler.cohort(t)] += 1
    p = weights / weights.sum()
    expected = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    np.testing.assert_allclose(counts / 8000, expected, atol=0.02)


def test_the_first_cohort_of_a_cyclic_sampler_is_the_first_of_its_order() -> None:
    order = keyed_rng(3, "cyclic order").permutation(6)
    assert Cyclic(6, 2, seed=3).cohort(1).tolist() == sorted(order[:2].tolist())


def test_cohorts_of_a_weighted_sampler_depend_on_the_seed() -> None:
    weights = np.arange(1, 51)
    cohorts = {tuple(Weighted(5, weights, seed).cohort(1).tolist()) for seed in range(5)}
    assert len(cohorts) == 5
