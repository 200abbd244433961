"""Per-class Dirichlet, k classes per client, shards, and client sizes from a Dirichlet distribution."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel import Dataset, KeelError
from keel.core.examples import Examples, Partition
from keel.core.randomness import keyed_rng
from keel.data.partition import dirichlet, partition_dataset
from keel.data.skew import dirichlet_per_class, k_classes, quantity, shards
from keel.data.statistics import heterogeneity

label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)
BALANCED = np.repeat(np.arange(10), 500)


def rng(seed: int = 0) -> np.random.Generator:
    return keyed_rng(seed, "partition")


def assert_every_example_once(partition: Partition, examples: int) -> None:
    assert sorted(partition.indices.tolist()) == list(range(examples))


def label_counts(labels: np.ndarray, partition: Partition) -> np.ndarray:
    return np.array([np.bincount(labels[partition[c]], minlength=10) for c in range(partition.clients)])


def naive_dirichlet_per_class(
    labels: list[int], clients: int, alpha: float, seed: int, min_examples: int
) -> list[Counter[int]]:
    """Count the labels of each client as the published loop over classes gives them."""
    random = rng(seed)
    while True:
        parts: list[Counter[int]] = [Counter() for _ in range(clients)]
        for label in sorted(set(labels)):
            weights = random.dirichlet([alpha] * clients).tolist()
            for client in range(clients):
                if parts[client].total() >= len(labels) / clients:
                    weights[client] = 0.0
            if sum(weights) == 0:
                weights = [float(part.total() < len(labels) / clients) for part in parts]
            begin, share = 0, 0.0
            for client in range(clients):
                share += weights[client] / sum(weights)
                last = client == clients - 1
                end = labels.count(label) if last else int(share * labels.count(label) + 1e-9)
                parts[client][label] += end - begin
                begin = end
        if min(part.total() for part in parts) >= min_examples:
            return parts


@settings(max_examples=40)
@given(label_lists, st.integers(1, 8), st.sampled_from([0.05, 0.3, 1.0, 30.0]), st.integers(0, 99))
def test_per_class_proportions_are_those_of_the_loop_over_classes(
    labels: np.ndarray, clients: int, alpha: float, seed: int
) -> None:
    clients = 1 + clients % len(labels)
    try:
        partition = dirichlet_per_class(labels, clients, alpha, rng(seed), min_examples=1)
    except KeelError as error:
        assert "a client had fewer than 1 of" in str(error)  # noqa: PT017 (often, no error is raised)
        return
    assert_every_example_once(partition, len(labels))
    assert partition.sizes.min() >= 1
    assert np.array_equal(
        partition.indices, dirichlet_per_class(labels, clients, alpha, rng(seed), min_examples=1).indices
    )
    expected = naive_dirichlet_per_class(labels.tolist(), clients, alpha, seed, 1)
    for client, part in enumerate(expected):
        found = Counter(labels[partition[client]].tolist())
        assert found == +part


@given(st.integers(1, 200), st.integers(1, 20), st.floats(0.05, 100), st.integers(0, 99), st.integers(1, 5))
def test_quantity_skew_divides_shuffled_examples_by_dirichlet_shares(
    examples: int, clients: int, alpha: float, seed: int, least: int
) -> None:
    try:
        partition = quantity(examples, clients, alpha, rng(seed), least)
    except KeelError as error:
        assert clients * least > examples or "in each of 500 draws" in str(error)  # noqa: PT017
        return
    assert_every_example_once(partition, examples)
    assert partition.sizes.min() >= least
    random = rng(seed)
    while True:
        ends = [int(share * examples + 1e-9) for share in np.cumsum(random.dirichlet([alpha] * clients))][:-1]
        sizes = [end - begin for begin, end in zip([0, *ends], [*ends, examples], strict=True)]
        if min(sizes) >= least:
            break
    assert partition.sizes.tolist() == sizes


def test_quantity_skew_falls_with_alpha_and_leaves_the_labels_iid() -> None:
    few, many = (quantity(len(BALANCED), 20, alpha, rng()) for alpha in (0.5, 100.0))
    assert few.sizes.std() > 3 * many.sizes.std()
    large = few.sizes > 200
    assert (np.abs(label_counts(BALANCED, few)[large] / few.sizes[large, None] - 0.1) < 0.1).all()


@given(label_lists, st.integers(1, 30), st.integers(1, 5), st.integers(0, 99))
def test_each_client_has_exactly_k_classes_and_classes_have_equally_many_clients(
    labels: np.ndarray, clients: int, k: int, seed: int
) -> None:
    counts = np.unique(labels, return_counts=True)[1]
    try:
        partition = k_classes(labels, clients, k, rng(seed))
    except KeelError:
        assert k > len(counts) or clients * k < len(counts) or counts.min() < -(-clients * k // len(counts))
        return
    assert_every_example_once(partition, len(labels))
    held = [np.unique(labels[partition[client]]) for client in range(clients)]
    assert {len(classes) for classes in held} == {k}
    holders = Counter(np.concatenate(held).tolist())
    assert max(holders.values()) - min(holders.values()) <= 1
    for label, number in holders.items():
        shares = [int((labels[partition[client]] == label).sum()) for client in range(clients)]
        assert {share for share in shares if share} <= {
            int((labels == label).sum()) // number,
            -(-int((labels == label).sum()) // number),
        }
    assert np.array_equal(partition.indices, k_classes(labels, clients, k, rng(seed)).indices)


def test_clients_with_two_classes_have_many_different_pairs() -> None:
    partition = k_classes(BALANCED, 100, 2, rng())
    pairs = {tuple(np.unique(BALANCED[partition[client]]).tolist()) for client in range(100)}
    assert len(pairs) > 20  # of 45


@given(label_lists, st.integers(1, 20), st.integers(1, 4), st.integers(0, 99))
def test_shards_are_contiguous_parts_of_the_sorted_examples(
    labels: np.ndarray, clients: int, per_client: int, seed: int
) -> None:
    if clients * per_client > len(labels):
        with pytest.raises(KeelError, match=r"data\.shards_per_client must be from 1 to"):
            shards(labels, clients, per_client, rng(seed))
        return
    partition = shards(labels, clients, per_client, rng(seed))
    assert_every_example_once(partition, len(labels))
    by_label = sorted(range(len(labels)), key=lambda row: labels[row])
    cuts = [shard * len(labels) // (clients * per_client) for shard in range(clients * per_client + 1)]
    pieces = [by_label[begin:end] for begin, end in pairwise(cuts)]
    for client in range(clients):
        rows = partition[client].tolist()
        mine = [piece for piece in pieces if piece[0] in rows]
        assert len(mine) == per_client
        assert rows == [row for piece in mine for row in piece]
    assert np.array_equal(partition.indices, shards(labels, clients, per_client, rng(seed)).indices)


def test_two_shards_give_a_client_at_most_two_of_the_digits() -> None:
    partition = shards(BALANCED, 100, 2, rng())
    assert set(partition.sizes.tolist()) == {50}
    assert (label_counts(BALANCED, partition) > 0).sum(1).max() == 2


@pytest.mark.parametrize("clients", [10, 100])
def test_with_ten_classes_alpha_of_dirichlet_is_ten_times_that_of_dirichlet_per_class(clients: int) -> None:
    labels = np.repeat(np.arange(10), 2000)
    partitions = {
        "per client": [dirichlet(labels, clients, 5.0, rng(seed)) for seed in range(5)],
        "per class": [dirichlet_per_class(labels, clients, 0.5, rng(seed)) for seed in range(5)],
        "same alpha": [dirichlet(labels, clients, 0.5, rng(seed)) for seed in range(5)],
    }
    entropy = {
        name: np.mean([heterogeneity(label_counts(labels, partition))["label_entropy"] for partition in drawn])
        for name, drawn in partitions.items()
    }
    assert entropy["per class"] == pytest.approx(entropy["per client"], abs=0.2)
    assert entropy["same alpha"] < entropy["per class"] - 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda labels, clients: dirichlet_per_class(labels, clients, 5.0, rng(), min_examples=1),
        lambda labels, clients: k_classes(labels, clients, 2, rng()),
        lambda labels, clients: shards(labels, clients, 2, rng()),
        lambda labels, clients: quantity(len(labels), clients, 5.0, rng(), min_examples=1),
    ],
    ids=["dirichlet_per_class", "classes", "shards", "quantity"],
)
def test_many_clients_are_partitioned_without_a_loop_over_them(draw, monkeypatch) -> None:
    labels = np.random.default_rng(0).integers(0, 4, 500_000)
    monkeypatch.setattr(Partition, "__getitem__", None)
    monkeypatch.setattr(Partition, "of", None)
    partition = draw(labels, 50_000)
    assert partition.clients == 50_000
    assert partition.sizes.sum() == len(labels)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheme": "dirichlet_per_class"}, r"data.alpha must be set for data.partition = 'dirichlet_per_class'"),
        (
            {"scheme": "quantity", "alpha": 0.0},
            r"data.alpha must be greater than 0 for data.partition = 'quantity' \(got 0.0\)",
        ),
        ({"scheme": "iid", "alpha": 0.5}, r"data.alpha = 0.5 requires data.partition = 'dirichlet', .* \(got 'iid'\)"),
        (
            {"scheme": "dirichlet", "classes_per_client": 2},
            r"data.classes_per_client = 2 requires data.partition = 'classes' \(got 'dirichlet'\)",
        ),
        ({"scheme": "classes"}, "data.classes_per_client must be set"),
        ({"scheme": "classes", "classes_per_client": 2.5}, r"must be a whole number from 1 \(got 2.5\)"),
        (
            {"scheme": "classes", "classes_per_client": 5},
            r"data.classes_per_client must be from 1 to 4, the number of classes \(got 5\)",
        ),
        (
            {"scheme": "classes", "classes_per_client": 1},
            r"data.clients must be at least 4 with data.classes_per_client = 1, .* \(got 2\)",
        ),
        (
            {"scheme": "classes", "classes_per_client": 3, "clients": 40},
            r"data.clients = 40 is too many for data.classes_per_client = 3: class 0 has 10 examples for 30 clients",
        ),
        ({"scheme": "shards", "shards_per_client": 21}, r"must be from 1 to 20, .* \(got 21\)"),
        ({"scheme": "feature", "noise": -1.0}, r"data.noise must be greater than 0 .* \(got -1.0\)"),
        ({"scheme": "dirichlet_per_class", "alpha": 1.0, "clients": 5}, r"data.min_examples must be at most 8 for 5"),
        (
            {"scheme": "dirichlet_per_class", "alpha": 0.001, "clients": 20, "min_examples": 2},
            r"data.alpha = 0.001 is too small for data.clients = 20: .* in each of 500 draws; use a larger alpha or "
            r"fewer clients, or a smaller data.min_examples$",
        ),
    ],
)
def test_an_impossible_partition_is_refused_with_the_fix(fields: dict, words: str) -> None:
    examples = Examples(torch.zeros(40, 2), torch.arange(40) % 4)
    with pytest.raises(KeelError, match=words):
        partition_dataset("some", Dataset(examples, examples, 4), seed=0, **{"clients": 2, **fields})


@pytest.mark.parametrize("targets", [torch.zeros(40, 3, dtype=torch.long), torch.linspace(0, 1, 40)])
@pytest.mark.parametrize(
    "fields",
    [
        {"scheme": "dirichlet"},
        {"scheme": "dirichlet_per_class", "alpha": 1.0},
        {"scheme": "classes", "classes_per_client": 1},
        {"scheme": "shards"},
    ],
    ids=lambda fields: fields["scheme"],
)
def test_targets_that_are_not_labels_cannot_be_partitioned_by_label(targets: torch.Tensor, fields: dict) -> None:
    examples = Examples(torch.zeros(40, 2), targets)
    with pytest.raises(KeelError, match=f"data.partition = '{fields['scheme']}' requires one label per example"):
        partition_dataset("some", Dataset(examples, examples, 0), seed=0, clients=2, **fields)
    data = partition_dataset("some", Dataset(examples, examples, 0), 0, "quantity", clients=2, alpha=5.0)
    assert data.partition.clients == 2
