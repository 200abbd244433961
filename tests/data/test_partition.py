import sys
from copy import deepcopy
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from keel import KeelError
from keel.data import federated
from keel.data.federated import Examples, Partition, Pool
from keel.data.partition import by_key, deal_out, dirichlet, iid, one_class, only
from keel.randomness import draws

label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)


def stream(seed: int = 0) -> np.random.Generator:
    return draws(seed, "partition")


def pool(keys: np.ndarray | None) -> Pool:
    """Examples that are their own number, in four classes."""
    count = 8 if keys is None else len(keys)
    examples = Examples(torch.arange(count)[:, None].float(), torch.arange(count) % 4)
    return Pool(examples, examples, classes=4, keys=keys)


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
    partition, names = by_key(np.array(keys))
    assert names.tolist() == sorted(set(keys))
    assert partition.clients == len(set(keys))
    for client, name in enumerate(sorted(set(keys))):
        assert [keys[i] for i in partition[client]] == [name] * keys.count(name)


def test_chosen_clients_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Partition(np.array([7, 3, 5, 0, 1, 9, 8, 2]), np.array([0, 2, 3, 6, 8]))
    monkeypatch.setattr(Partition, "__getitem__", None)  # a million clients are not looked up one by one
    some = only(whole, np.array([2, 0]))
    assert some.indices.tolist() == [0, 1, 9, 7, 3]
    assert some.offsets.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"way": "iid", "clients": 9}, "9 clients for 8 training examples"),
        ({"way": "iid", "clients": 0}, "data.clients: 0; accepted: a whole number from 1"),
        ({"way": "iid", "clients": 2, "min_examples": 2}, "data.min_examples: 2 goes with data.partition = 'key'"),
        ({"way": "dirichlet", "clients": 2}, "cannot cover 4 classes"),
        ({"way": "dirichlet"}, "data.clients: None; accepted: a whole number from 1"),
        ({"way": "dirichlet", "clients": 2, "alpha": float("nan")}, "data.alpha: nan"),
        ({"way": "key", "clients": 4}, "data.clients: 4, but there are 3; accepted: 1 to 3"),
        ({"way": "key", "min_examples": 6}, "data.min_examples: 6; accepted: at most 4"),
        ({"way": "key", "clients": 3, "min_examples": 2}, "data.clients: 3, but there are 2"),
    ],
)
def test_impossible_splits_are_refused_with_the_reason(arguments: dict, words: str) -> None:
    with pytest.raises(KeelError, match=words):
        deal_out("some", pool(np.array(["a", "b", "b", "b", "c", "c", "c", "c"])), seed=0, **arguments)


def test_a_set_without_keys_cannot_be_split_by_key() -> None:
    with pytest.raises(KeelError, match=r"data\.partition: 'key', but some has no keys"):
        deal_out("some", pool(None), seed=0, way="key")


def test_sequences_have_no_label_mixes() -> None:
    sequences = Examples(torch.zeros(8, 3), torch.zeros(8, 3, dtype=torch.long))
    with pytest.raises(KeelError, match=r"data\.partition: 'dirichlet' needs one label per example"):
        deal_out("some", Pool(sequences, sequences, 4), seed=0, way="dirichlet", clients=2)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_natural_clients_can_be_drawn_and_cut(keys: list[int], clients: int, least: int, most: int, seed: int) -> None:
    holders = {key: keys.count(key) for key in keys if keys.count(key) >= least}
    arguments = {"way": "key", "clients": clients, "min_examples": least, "max_examples": most, "seed": seed}
    if clients > len(holders):
        with pytest.raises(KeelError, match=r"data\.(clients|min_examples)"):
            deal_out("some", pool(np.array(keys)), **arguments)
        return
    partition = deal_out("some", pool(np.array(keys)), **arguments).partition
    assert partition.clients == clients
    assert len(np.unique(partition.indices)) == len(partition.indices)
    owners = []
    for client in range(clients):
        (owner,) = {keys[i] for i in partition[client]}
        assert len(partition[client]) == min(most, holders[owner])
        owners.append(owner)
    assert owners == sorted(set(owners))
    again = deal_out("some", pool(np.array(keys)), **arguments).partition
    assert np.array_equal(again.indices, partition.indices)


def test_the_test_examples_are_those_of_the_clients_that_take_part_and_no_more_than_asked() -> None:
    keys = np.repeat(np.arange(4), 5)
    whole = replace(pool(keys), test_keys=keys)
    data = deal_out("some", whole, seed=1, way="key", clients=2)
    assert set(keys[data.test.inputs[:, 0].long()]) == set(keys[data.partition.indices])
    assert len(data.test) == 10
    few = deal_out("some", whole, seed=1, way="key", test_examples=7)
    other_seed = deal_out("some", whole, seed=2, way="key", test_examples=7)
    assert len(few.test) == 7
    assert torch.equal(few.test.inputs, other_seed.test.inputs)


def test_only_rows_that_are_examples_are_dealt_out() -> None:
    rows = np.array([1, 4, 6, 7])
    whole = replace(pool(None), rows=rows)
    partition = deal_out("some", whole, seed=0, way="iid", clients=2).partition
    assert sorted(partition.indices) == rows.tolist()


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(KeelError, match="client 1 has no examples"):
        Partition.of([np.arange(3), np.arange(0), np.arange(2)])


def test_a_large_table_lies_in_a_file_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = np.split(np.random.default_rng(0).permutation(6000), [1000, 1007, 4000])
    small = Partition.of(parts)
    monkeypatch.setattr(federated, "LARGE", 1000)
    large = Partition.of(parts)
    assert isinstance(large.indices.base, mmap)
    assert not isinstance(small.indices.base, mmap)
    assert large.fingerprint() == small.fingerprint()
    assert not large.indices.flags.writeable
    assert not small.indices.flags.writeable
    for partition in (small, large, deepcopy(large)):
        for client, part in enumerate(parts):
            assert np.array_equal(partition[client], part)
        assert partition.sizes_of(np.array([2, 1])).tolist() == [2993, 7]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_of_a_table_in_a_file_nothing_that_was_read_stays_in_memory() -> None:
    clients = 400_000
    partition = Partition(np.arange(8 * clients) % 20_000, np.arange(clients + 1) * 8)
    for client in range(0, clients, 100):
        assert partition[client][0] == 8 * client % 20_000
    partition.fingerprint()
    address = partition.indices.ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in lines)
    assert next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="fills /dev/full")
@pytest.mark.parametrize("reason", ["full", "short", "no place"])
def test_where_there_is_no_room_a_large_table_stays_in_memory(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> IO[bytes]:
        if reason == "no place":
            raise FileNotFoundError
        return Path("/dev/full").open("r+b", buffering=-1 if reason == "short" else 0)

    monkeypatch.setattr(federated, "LARGE", 1000)
    monkeypatch.setattr(federated, "TemporaryFile", opened)
    partition = Partition.of([np.arange(400)])
    assert not isinstance(partition.indices.base, mmap)
    assert np.array_equal(partition[0], np.arange(400))
