from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keel import KeelError
from keel.core.metrics import DTYPES, FunctionMetric, decode, encode


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=3), max_size=3
    ),
    st.integers(0, 4),
)
def test_encoded_states_are_restored(states: list[list[tuple[torch.dtype, list[int]]]], padding: int) -> None:
    tensors = [[torch.randint(0, 2, shape).to(dtype) for dtype, shape in state] for state in states]
    restored = decode(torch.cat([encode(tensors), torch.zeros(padding, dtype=torch.float64)]))
    assert [len(state) for state in restored] == [len(state) for state in tensors]
    for state, again in zip(tensors, restored, strict=True):
        for tensor, same in zip(state, again, strict=True):
            assert tensor.dtype == same.dtype
            assert torch.equal(tensor, same)


@pytest.fixture
def adapter() -> ModuleType:
    """The module that imports torchmetrics, which takes seconds: only the worker that runs these tests imports it."""
    return import_module("keel.core.torchmetrics_adapter")


def in_chunks(metric: Any, outputs: Tensor, targets: Tensor, sizes: list[int]) -> float:
    """The metric from chunks whose states were encoded and decoded, as workers send them."""
    chunks = zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True)
    return metric.value([decode(encode([metric.state(*chunk)]))[0] for chunk in chunks])


def roc_area(scores: np.ndarray, labels: np.ndarray) -> float:
    """The share of pairs of a positive and a negative example that are ordered correctly."""
    pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_metrics_of_labels_equal_their_definitions_over_all_examples(adapter: ModuleType) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(50, 4), torch.randint(4, (50,))
    predicted, probabilities = outputs.argmax(1), outputs.softmax(1).double().numpy()
    f1 = []
    for label in range(4):
        hits = int(((predicted == label) & (targets == label)).sum())
        f1.append(2 * hits / int((predicted == label).sum() + (targets == label).sum()))
    areas = [roc_area(probabilities[:, label], (targets == label).numpy().astype(int)) for label in range(4)]
    top = (outputs.topk(2).indices == targets[:, None]).any(1).float().mean()
    for name, expected in {"f1": np.mean(f1), "auroc": np.mean(areas), "top2_accuracy": float(top)}.items():
        metric = adapter.find_metric(name, "classification", 4, ())
        assert metric.maximize
        assert in_chunks(metric, outputs, targets, [20, 20, 10]) == pytest.approx(expected, abs=1e-6)


def test_metrics_of_numbers_equal_their_definitions(adapter: ModuleType) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(30, 1), torch.randn(30)
    error = outputs[:, 0] - targets
    expected = {
        "mae": error.abs().mean(),
        "rmse": error.pow(2).mean().sqrt(),
        "r2": 1 - error.pow(2).sum() / (targets - targets.mean()).pow(2).sum(),
        "pearson": np.corrcoef(outputs[:, 0], targets)[0, 1],
    }
    for name, value in expected.items():
        metric = adapter.find_metric(name, "regression", 1, ())
        assert metric.maximize is {"r2": True, "pearson": None}.get(name, False)  # torchmetrics gives pearson none
        assert in_chunks(metric, outputs, targets, [7, 20, 3]) == pytest.approx(float(value), abs=1e-5)


def test_metrics_of_several_labels_equal_their_definitions(adapter: ModuleType) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(40, 3), torch.randint(2, (40, 3)).float()
    expected = np.mean([roc_area(outputs[:, k].double().numpy(), targets[:, k].numpy()) for k in range(3)])
    metric = adapter.find_metric("auroc", "multilabel", 3, ())
    assert in_chunks(metric, outputs, targets, [25, 15]) == pytest.approx(expected, abs=1e-6)


def test_perplexity_leaves_special_tokens_out(adapter: ModuleType) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    kept = targets != 0
    expected = torch.nn.functional.cross_entropy(outputs[kept], targets[kept]).exp()
    metric = adapter.find_metric("perplexity", "sequence", 7, (0,))
    assert in_chunks(metric, outputs, targets, [4, 2]) == pytest.approx(float(expected), rel=1e-5)


def test_a_function_gets_all_outputs_at_once() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(9, 2), torch.randint(2, (9,))
    metric = FunctionMetric("median", lambda o, t: o[:, 0].median() + len(t))
    assert in_chunks(metric, outputs, targets, [4, 5]) == pytest.approx(float(outputs[:, 0].median()) + 9)
    with pytest.raises(KeelError, match=r"'pair' must return one number \(got \(2,\)\)"):
        FunctionMetric("pair", lambda o, t: o[0]).value([[outputs, targets]])


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("rmse", "classification", "'rmse' does not suit classification targets; use one of"),
        ("auroc", "regression", "'auroc' does not suit regression targets; use one of"),
        ("top5", "regression", "'top5' does not suit regression targets"),
        ("top5", "classification", "'top5' requires at least 5 classes"),
        ("perplexity", "classification", "'perplexity' does not suit"),
        ("auroch", "classification", "unknown evaluation.metrics 'auroch'; did you mean 'auroc'"),
        ("f_beta_score", "classification", "needs settings .*pass a torchmetrics object"),
    ],
)
def test_a_metric_that_does_not_suit_the_task_is_refused(
    adapter: ModuleType, name: str, task: str, message: str
) -> None:
    with pytest.raises(KeelError, match=message):
        adapter.find_metric(name, task, 4, ())


def test_objects_of_torchmetrics_are_named_by_their_class(adapter: ModuleType) -> None:
    metric = adapter.of_object(adapter.torchmetrics.classification.MulticlassFBetaScore(2.0, 3), "classification", ())
    assert metric.name == "fbeta_score"
    assert {"f1", "auroc", "calibration_error", "average_precision"} <= set(adapter.names("classification"))


def test_the_internals_of_torchmetrics_are_as_the_adapter_expects(adapter: ModuleType) -> None:
    metric = adapter.torchmetrics.regression.MeanAbsoluteError()
    assert set(metric._defaults) == set(metric._reductions)
    assert all(reduction in adapter.JOINED for reduction in metric._reductions.values())
