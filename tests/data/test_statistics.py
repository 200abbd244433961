from dataclasses import replace
from math import log2
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel import Dataset, KeelError, make_spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.data.statistics import client_statistics, heterogeneity, label_counts
from keel.report.label_distribution import label_chart
from keel.runs.build import load_data
from tests.conftest import uneven_data


def test_labels_are_counted_per_client() -> None:
    data = uneven_data()
    counts = label_counts(data, np.arange(6))
    for client in range(6):
        assert counts[client].tolist() == np.bincount(data.client(client).targets, minlength=3).tolist()


def test_special_tokens_are_not_counted() -> None:
    sequences = Examples(torch.zeros(2, 3), torch.tensor([[1, 2, 0], [2, 2, 3]]))
    data = FederatedData("text", sequences, sequences, Partition.of([np.array([0, 1])]), 4, specials=(0, 3))
    assert label_counts(data, np.array([0])).tolist() == [[0, 1, 3, 0]]


def test_heterogeneity_falls_from_one_class_per_client_to_iid() -> None:
    federated = {alpha: load_data(make_spec({"data": {"alpha": alpha, "clients": 10}})) for alpha in (0.0, 1.0, 1e4)}
    measures = {alpha: heterogeneity(label_counts(data, np.arange(10))) for alpha, data in federated.items()}
    assert measures[0.0]["label_entropy"] == 0
    assert measures[0.0]["label_distance"] == pytest.approx(0.9, abs=0.02)
    assert measures[10_000.0]["label_entropy"] > 3.2
    assert measures[10_000.0]["label_distance"] < 0.15
    assert 0.15 < measures[1.0]["label_distance"] < 0.9


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_measures_follow_their_definitions(rows: list[list[int]]) -> None:
    rows = [[first + 1, *others] for first, *others in rows]
    overall = [sum(column) / sum(map(sum, rows)) for column in zip(*rows, strict=True)]
    clients = [[count / sum(row) for count in row] for row in rows]

    def entropy(distribution: list[float]) -> float:
        return sum(-p * log2(p) for p in distribution if p)

    distances = [sum(max(0.0, p - q) for p, q in zip(client, overall, strict=True)) for client in clients]
    assert heterogeneity(np.array(rows)) == {
        "label_entropy": pytest.approx(fmean(map(entropy, clients)), abs=1e-3),
        "label_entropy_whole": pytest.approx(entropy(overall), abs=1e-3),
        "label_distance": pytest.approx(fmean(distances), abs=1e-3),
    }


def test_labels_of_at_most_1000_clients_are_counted() -> None:
    examples = Examples(torch.zeros(5000, 1), torch.arange(5000) % 7)
    data = FederatedData("large", examples, examples, Partition(np.arange(5000), np.arange(5001)), 7)
    statistics = client_statistics(data)
    assert (statistics["clients"], statistics["measured_clients"]) == (5000, 1000)
    assert len(statistics["picture"]["clients"]) == 50


def test_the_picture_has_the_names_of_classes_and_clients() -> None:
    data = replace(uneven_data(), class_names=("cat", "dog", "eel"), client_names=np.array(list("uvwxyz")))
    statistics = client_statistics(data)
    picture = statistics["picture"]
    assert picture["class_names"] == ["cat", "dog", "eel"]
    assert picture["client_names"] == ["uvwxyz"[client] for client in picture["clients"]]
    chart = label_chart(statistics, 60)
    assert "classes cat to eel;" in chart
    assert chart.endswith("classes: 0 cat, 1 dog, 2 eel")
    assert [line.split()[0] for line in chart.splitlines()[1:7]] == picture["client_names"]
    assert "class_names" not in client_statistics(uneven_data())["picture"]


def test_every_class_needs_a_name_of_its_own() -> None:
    examples = uneven_data().train
    with pytest.raises(KeelError, match=r"data\.class_names must be 3 different names, one per class \(got \('a', 'a'"):
        Dataset(examples, examples, 3, class_names=("a", "a", "b"))


def test_targets_that_are_not_labels_have_no_picture() -> None:
    data = uneven_data()
    statistics = client_statistics(FederatedData("regression", data.train, data.test, data.partition, classes=0))
    assert "picture" not in statistics
