import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keel.sampling import Cyclic, Uniform, Weighted

populations = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
seeds = st.integers(0, 1000)


@given(populations, seeds, st.integers(1, 1000))
def test_uniform_cohorts_hold_the_asked_number_of_distinct_clients(sizes: tuple[int, int], seed: int, t: int) -> None:
    clients, size = sizes
    cohort = Uniform(clients, size, seed).cohort(t)
    assert len(set(cohort.tolist())) == size
    assert cohort.min() >= 0
    assert cohort.max() < clients
    assert (cohort == Uniform(clients, size, seed).cohort(t)).all()


def test_uniform_takes_every_client_equally_often() -> None:
    counts = np.bincount(np.concatenate([Uniform(10, 3, 0).cohort(t) for t in range(1, 4001)]), minlength=10)
    assert abs(counts / 4000 - 0.3).max() < 0.03


@given(populations, seeds)
def test_cyclic_takes_every_client_once_in_a_period_always_in_the_same_round(sizes: tuple[int, int], seed: int) -> None:
    clients, size = sizes
    sampler = Cyclic(clients, size, seed)
    period = int(sampler.period)
    cycle = [sampler.cohort(t) for t in range(1, period + 1)]
    assert sorted(np.concatenate(cycle).tolist()) == list(range(clients))
    assert max(map(len, cycle)) <= size
    assert max(map(len, cycle)) - min(map(len, cycle)) <= 1
    for t in range(period + 1, 2 * period + 1):
        assert (sampler.cohort(t) == cycle[t - period - 1]).all()


def test_cyclic_order_is_shuffled() -> None:
    assert Cyclic(20, 5, 0).cohort(1).tolist() != Cyclic(20, 5, 1).cohort(1).tolist()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_weighted_cohorts_hold_distinct_clients(weights: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(weights)))
    cohort = Weighted(size, np.array(weights), 0).cohort(1)
    assert len(set(cohort.tolist())) == size


def test_weighted_follows_the_law_of_successive_draws() -> None:
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    sampler = Weighted(2, weights, 0)
    counts = np.zeros(4)
    for t in range(1, 8001):
        counts[sampler.cohort(t)] += 1
    p = weights / weights.sum()
    expected = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    np.testing.assert_allclose(counts / 8000, expected, atol=0.02)
