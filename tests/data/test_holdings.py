import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel import make_spec
from keel.data.federated import Examples, FederatedData, Partition
from keel.data.holdings import heterogeneity, holdings, label_counts
from keel.task import load_data
from tests.conftest import uneven_data


def test_counts_are_those_of_each_client() -> None:
    data = uneven_data()
    counts = label_counts(data, np.arange(6))
    for client in range(6):
        assert counts[client].tolist() == np.bincount(data.client(client).targets, minlength=3).tolist()


def test_padding_and_special_tokens_are_no_labels() -> None:
    sequences = Examples(torch.zeros(2, 3), torch.tensor([[1, 2, 0], [2, 2, 3]]))
    data = FederatedData("text", sequences, sequences, Partition.of([np.array([0, 1])]), 4, specials=(0, 3))
    assert label_counts(data, np.array([0])).tolist() == [[0, 1, 3, 0]]


def test_one_class_per_client_and_iid_are_the_ends_of_the_scale() -> None:
    dealt = {alpha: load_data(make_spec({"data": {"alpha": alpha, "clients": 10}})) for alpha in (0.0, 1.0, 1e4)}
    ends = {alpha: heterogeneity(label_counts(data, np.arange(10))) for alpha, data in dealt.items()}
    assert ends[0.0]["label_entropy"] == 0
    assert ends[0.0]["label_distance"] == pytest.approx(0.9, abs=0.02)
    assert ends[10_000.0]["label_entropy"] > 3.2
    assert ends[10_000.0]["label_distance"] < 0.15
    assert 0.15 < ends[1.0]["label_distance"] < 0.9


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_measures_stay_within_their_bounds(rows: list[list[int]]) -> None:
    counts = np.array(rows)
    counts[:, 0] += 1
    measured = heterogeneity(counts)
    assert 0 <= measured["label_entropy"] <= np.log2(3) + 1e-3
    assert 0 <= measured["label_distance"] <= 1
    assert measured["label_entropy"] <= measured["label_entropy_whole"] + np.log2(3)


def test_a_large_federation_is_told_from_a_part_of_it() -> None:
    examples = Examples(torch.zeros(5000, 1), torch.arange(5000) % 7)
    data = FederatedData("large", examples, examples, Partition(np.arange(5000), np.arange(5001)), 7)
    told = holdings(data)
    assert (told["clients"], told["measured_clients"]) == (5000, 1000)
    assert len(told["picture"]["clients"]) == 50


def test_targets_that_are_no_labels_have_no_picture() -> None:
    data = uneven_data()
    told = holdings(FederatedData("regression", data.train, data.test, data.partition, classes=0))
    assert "picture" not in told
