import sys
from copy import deepcopy
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel import Dataset, KeelError
from keel.core import examples
from keel.core.examples import Examples, Partition
from keel.core.randomness import keyed_rng
from keel.data import partition as partition_module
from keel.data.partition import by_key, dirichlet, iid, one_class, partition_dataset, select_clients

label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)


def rng(seed: int = 0) -> np.random.Generator:
    return keyed_rng(seed, "partition")


def numbered(keys: np.ndarray | None) -> Dataset:
    """Make a data set of four classes whose inputs are the numbers of the examples."""
    count = 8 if keys is None else len(keys)
    examples = Examples(torch.arange(count)[:, None].float(), torch.arange(count) % 4)
    return Dataset(examples, examples, classes=4, keys=keys)


def assert_no_example_twice(partition: Partition, examples: int) -> None:
    assert len(np.unique(partition.indices)) == len(partition.indices)
    assert partition.indices.min() >= 0
    assert partition.indices.max() < examples


@given(st.integers(1, 200), st.integers(1, 200))
def test_iid_clients_have_equal_sizes(examples: int, clients: int) -> None:
    clients = 1 + clients % examples
    partition = iid(examples, clients, rng())
    assert_no_example_twice(partition, examples)
    assert set(partition.sizes.tolist()) == {examples // clients}
    assert partition.clients == clients


@given(label_lists, st.integers(1, 30), st.floats(1e-6, 1e4), st.integers(0, 99))
def test_dirichlet_clients_have_equal_sizes_for_any_concentration(
    labels: np.ndarray, clients: int, alpha: float, seed: int
) -> None:
    clients = 1 + clients % len(labels)
    partition = dirichlet(labels, clients, alpha, rng(seed))
    assert_no_example_twice(partition, len(labels))
    assert set(partition.sizes.tolist()) == {len(labels) // clients}
    assert (partition.indices == dirichlet(labels, clients, alpha, rng(seed)).indices).all()


@given(label_lists, st.integers(1, 30), st.floats(1e-2, 1e2), st.integers(1, 7))
def test_dirichlet_does_not_depend_on_how_many_clients_are_drawn_in_one_call(
    labels: np.ndarray, clients: int, alpha: float, group: int
) -> None:
    clients = 1 + clients % len(labels)
    expected = dirichlet(labels, clients, alpha, rng())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_module, "CLIENTS_PER_DRAW", group)
        assert np.array_equal(dirichlet(labels, clients, alpha, rng()).indices, expected.indices)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 40))
def test_further_one_class_clients_go_to_the_class_with_the_most_examples_per_client(
    counts: list[int], further: int
) -> None:
    clients = [1] * len(counts)
    for _ in range(further):
        per_client = [count / n for count, n in zip(counts, clients, strict=True)]
        clients[per_client.index(max(per_client))] += 1
    size = min(count // n for count, n in zip(counts, clients, strict=True))
    labels = np.repeat(np.arange(len(counts)), counts)
    if size == 0:
        with pytest.raises(KeelError, match=r"data\.clients = .* is too many"):
            one_class(labels, sum(clients), rng())
        return
    partition = one_class(labels, sum(clients), rng())
    assert partition.sizes.tolist() == [size] * sum(clients)
    assert np.bincount(labels[partition.indices]).tolist() == [size * n for n in clients]


@given(label_lists, st.integers(1, 30))
def test_one_class_clients_have_one_class_and_cover_all_classes(labels: np.ndarray, clients: int) -> None:
    classes = len(np.unique(labels))
    try:
        partition = one_class(labels, clients, rng())
    except KeelError:
        assert clients < classes or clients > len(labels) or np.bincount(labels).max() < clients
        return
    assert_no_example_twice(partition, len(labels))
    assert len(set(partition.sizes.tolist())) == 1
    classes_of = [np.unique(labels[partition[c]]) for c in range(clients)]
    assert all(len(found) == 1 for found in classes_of)
    assert len({int(found[0]) for found in classes_of}) == classes


def test_label_distributions_approach_the_whole_as_alpha_grows() -> None:
    labels = np.repeat(np.arange(10), 500)

    def distance(alpha: float) -> float:
        partition = dirichlet(labels, 50, alpha, rng())
        distributions = np.array([np.bincount(labels[partition[c]], minlength=10) / 100 for c in range(50)])
        return float(np.abs(distributions - 0.1).sum(axis=1).mean())

    near_one_class, middle, near_iid = distance(0.01), distance(10.0), distance(10_000.0)
    assert near_one_class > 1.4  # one class per client gives 1.8
    assert 0.5 < middle < 1.4
    assert near_iid < 0.3


def test_label_distributions_have_the_mean_of_the_whole() -> None:
    labels = np.array([0] * 900 + [1] * 100)
    partition = dirichlet(labels, 10, 10_000.0, rng())
    shares = [labels[partition[c]].mean() for c in range(10)]
    np.testing.assert_allclose(shares, 0.1, atol=0.08)


@given(st.lists(st.sampled_from(["anna", "ben", "cleo"]), min_size=1, max_size=40))
def test_each_natural_key_is_one_client(keys: list[str]) -> None:
    partition, names = by_key(np.array(keys))
    assert names.tolist() == sorted(set(keys))
    assert partition.clients == len(set(keys))
    for client, name in enumerate(sorted(set(keys))):
        assert [keys[i] for i in partition[client]] == [name] * keys.count(name)


def test_selected_clients_keep_their_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Partition(np.array([7, 3, 5, 0, 1, 9, 8, 2]), np.array([0, 2, 3, 6, 8]))
    monkeypatch.setattr(Partition, "__getitem__", None)  # the selection must not loop over a million clients
    some = select_clients(whole, np.array([2, 0]))
    assert some.indices.tolist() == [0, 1, 9, 7, 3]
    assert some.offsets.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scheme": "iid", "clients": 9}, r"data.clients must be from 1 to 8, .* \(got 9\)"),
        ({"scheme": "iid", "clients": 0}, r"data.clients must be from 1 to 8, .* \(got 0\)"),
        (
            {"scheme": "iid", "clients": 2, "min_examples": 2},
            r"data.min_examples = 2 requires data.partition = 'key', 'dirichlet_per_class' or 'quantity' \(got 'iid'\)",
        ),
        (
            {"scheme": "dirichlet", "clients": 2},
            r"data.clients must be at least 4, the number of classes, with data.alpha = 0 \(got 2\)",
        ),
        ({"scheme": "dirichlet"}, r"data.clients must be a whole number from 1 .* \(got None\)"),
        ({"scheme": "dirichlet", "clients": 2, "alpha": float("nan")}, r"data.alpha must be .* \(got nan\)"),
        ({"scheme": "key", "clients": 4}, r"data.clients must be at most 3, .* \(got 4\)"),
        ({"scheme": "key", "min_examples": 6}, r"data.min_examples must be at most 4, .* \(got 6\)"),
        (
            {"scheme": "key", "clients": 3, "min_examples": 2},
            r"data.clients must be at most 2, .* with 2 examples or more \(got 3\)",
        ),
    ],
)
def test_an_impossible_partition_is_refused_with_the_reason(arguments: dict, words: str) -> None:
    with pytest.raises(KeelError, match=words):
        partition_dataset("some", numbered(np.array(["a", "b", "b", "b", "c", "c", "c", "c"])), seed=0, **arguments)


def test_a_data_set_without_keys_cannot_be_partitioned_by_key() -> None:
    with pytest.raises(KeelError, match=r"data\.partition = 'key' requires natural clients, which some does not have"):
        partition_dataset("some", numbered(None), seed=0, scheme="key")


def test_sequences_cannot_be_partitioned_by_label() -> None:
    sequences = Examples(torch.zeros(8, 3), torch.zeros(8, 3, dtype=torch.long))
    with pytest.raises(KeelError, match=r"data\.partition = 'dirichlet' requires one label per example"):
        partition_dataset("some", Dataset(sequences, sequences, 4), seed=0, scheme="dirichlet", clients=2)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_natural_clients_are_drawn_and_limited(keys: list[int], clients: int, least: int, most: int, seed: int) -> None:
    sizes = {key: keys.count(key) for key in keys if keys.count(key) >= least}
    arguments = {"scheme": "key", "clients": clients, "min_examples": least, "max_examples": most, "seed": seed}
    if clients > len(sizes):
        with pytest.raises(KeelError, match=r"data\.(clients|min_examples)"):
            partition_dataset("some", numbered(np.array(keys)), **arguments)
        return
    partition = partition_dataset("some", numbered(np.array(keys)), **arguments).partition
    assert partition.clients == clients
    assert len(np.unique(partition.indices)) == len(partition.indices)
    drawn_keys = []
    for client in range(clients):
        (key,) = {keys[i] for i in partition[client]}
        assert len(partition[client]) == min(most, sizes[key])
        drawn_keys.append(key)
    assert drawn_keys == sorted(set(drawn_keys))
    again = partition_dataset("some", numbered(np.array(keys)), **arguments).partition
    assert np.array_equal(again.indices, partition.indices)


def test_test_examples_belong_to_the_drawn_clients_and_can_be_limited() -> None:
    keys = np.repeat(np.arange(4), 5)
    whole = replace(numbered(keys), test_keys=keys)
    data = partition_dataset("some", whole, seed=1, scheme="key", clients=2)
    assert set(keys[data.test.inputs[:, 0].long()]) == set(keys[data.partition.indices])
    assert len(data.test) == 10
    few = partition_dataset("some", whole, seed=1, scheme="key", test_examples=7)
    other_seed = partition_dataset("some", whole, seed=2, scheme="key", test_examples=7)
    assert len(few.test) == 7
    assert torch.equal(few.test.inputs, other_seed.test.inputs)


def test_only_rows_that_are_examples_are_partitioned() -> None:
    rows = np.array([1, 4, 6, 7])
    whole = replace(numbered(None), rows=rows)
    partition = partition_dataset("some", whole, seed=0, scheme="iid", clients=2).partition
    assert sorted(partition.indices) == rows.tolist()


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(KeelError, match="client 1 has no examples"):
        Partition.of([np.arange(3), np.arange(0), np.arange(2)])


def test_a_large_index_table_is_kept_in_a_file_with_the_same_content(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = np.split(np.random.default_rng(0).permutation(6000), [1000, 1007, 4000])
    small = Partition.of(parts)
    monkeypatch.setattr(examples, "FILE_BACKED_FROM", 1000)
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
def test_pages_of_a_file_backed_table_are_released_after_each_read() -> None:
    clients = 400_000
    partition = Partition(np.arange(8 * clients) % 20_000, np.arange(clients + 1) * 8)
    for client in range(0, clients, 100):
        assert partition[client][0] == 8 * client % 20_000
    partition.fingerprint()
    address = partition.indices.ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in lines)
    assert next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="requires /dev/full")
@pytest.mark.parametrize("reason", ["full", "full with buffering", "no folder"])
def test_a_large_table_stays_in_memory_if_the_file_cannot_be_written(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> IO[bytes]:
        if reason == "no folder":
            raise FileNotFoundError
        return Path("/dev/full").open("r+b", buffering=-1 if reason == "full with buffering" else 0)

    monkeypatch.setattr(examples, "FILE_BACKED_FROM", 1000)
    monkeypatch.setattr(examples, "TemporaryFile", opened)
    partition = Partition.of([np.arange(400)])
    assert not isinstance(partition.indices.base, mmap)
    assert np.array_equal(partition[0], np.arange(400))
