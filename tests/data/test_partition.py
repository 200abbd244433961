import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keel import KeelError
from keel.data.federated import Partition
from keel.data.partition import by_key, deal, dirichlet, iid, one_class
from keel.randomness import draws

label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)


def stream(seed: int = 0) -> np.random.Generator:
    return draws(seed, "partition")


def assert_each_example_at_most_once(partition: Partition, examples: int) -> None:
    assert len(np.unique(partition.indices)) == len(partition.indices)
    assert partition.indices.min() >= 0
    assert partition.indices.max() < examples


@given(st.integers(1, 200), st.integers(1, 200))
def test_iid_deals_equal_parts(examples: int, clients: int) -> None:
    assume(clients <= examples)
    partition = iid(examples, clients, stream())
    assert_each_example_at_most_once(partition, examples)
    assert set(partition.sizes.tolist()) == {examples // clients}
    assert partition.clients == clients


@given(label_lists, st.integers(1, 30), st.floats(1e-6, 1e4), st.integers(0, 99))
def test_dirichlet_deals_equal_parts_for_any_concentration(
    labels: np.ndarray, clients: int, alpha: float, seed: int
) -> None:
    assume(clients <= len(labels))
    partition = dirichlet(labels, clients, alpha, stream(seed))
    assert_each_example_at_most_once(partition, len(labels))
    assert set(partition.sizes.tolist()) == {len(labels) // clients}
    assert (partition.indices == dirichlet(labels, clients, alpha, stream(seed)).indices).all()


@given(label_lists, st.integers(1, 30))
def test_one_class_clients_hold_one_class_and_cover_all(labels: np.ndarray, clients: int) -> None:
    classes = len(np.unique(labels))
    try:
        partition = one_class(labels, clients, stream())
    except KeelError:
        assert clients < classes or clients > len(labels) or np.bincount(labels).max() < clients
        return
    assert_each_example_at_most_once(partition, len(labels))
    assert len(set(partition.sizes.tolist())) == 1
    held = [np.unique(labels[partition[c]]) for c in range(clients)]
    assert all(len(mine) == 1 for mine in held)
    assert len({int(mine[0]) for mine in held}) == classes


def test_heterogeneity_falls_as_alpha_grows() -> None:
    labels = np.repeat(np.arange(10), 500)

    def distance(alpha: float) -> float:
        partition = dirichlet(labels, 50, alpha, stream())
        mixes = np.array([np.bincount(labels[partition[c]], minlength=10) / 100 for c in range(50)])
        return float(np.abs(mixes - 0.1).sum(axis=1).mean())

    near_one_class, middle, near_iid = distance(0.01), distance(10.0), distance(10_000.0)
    assert near_one_class > 1.4  # 1.8 is one class
    assert 0.5 < middle < 1.4
    assert near_iid < 0.3


def test_class_mixes_follow_the_prior() -> None:
    labels = np.array([0] * 900 + [1] * 100)
    partition = dirichlet(labels, 10, 10_000.0, stream())
    shares = [labels[partition[c]].mean() for c in range(10)]
    np.testing.assert_allclose(shares, 0.1, atol=0.08)


@given(st.lists(st.sampled_from(["anna", "ben", "cleo"]), min_size=1, max_size=40))
def test_a_natural_key_gives_each_of_its_values_a_client(keys: list[str]) -> None:
    partition = by_key(np.array(keys))
    assert partition.clients == len(set(keys))
    for client, name in enumerate(sorted(set(keys))):
        assert [keys[i] for i in partition[client]] == [name] * keys.count(name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clients": 9}, "9 clients for 8 training examples"),
        ({"clients": 2, "alpha": 0.0}, "cannot cover 4 classes"),
        ({"keys": np.arange(5)}, "5 keys for 8 inputs"),
        ({"keys": np.arange(8), "clients": 3}, "there are 8 keys"),
        ({}, "data.clients: None; accepted: a whole number from 1"),
        ({"clients": 2, "alpha": float("nan")}, "data.alpha: nan"),
    ],
)
def test_impossible_splits_are_refused_with_the_reason(arguments: dict, words: str) -> None:
    with pytest.raises(KeelError, match=words):
        deal(np.arange(8) % 4, stream(), **arguments)


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(KeelError, match="client 1 has no examples"):
        Partition.of([np.arange(3), np.arange(0), np.arange(2)])
