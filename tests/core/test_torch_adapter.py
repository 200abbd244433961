"""Each private or experimental interface of PyTorch that Keel uses, by itself: a failure names the one that broke.

The compiler takes 20 s: it is tested once, in tests/engines/test_compiled.py.
"""

import pytest
import torch
from torch import Tensor, nn

from keel.core.torch_adapter import BATCH_NORM, WorkCounter, has_hooks, record_gradients


def test_batch_norm_layers_have_one_base_class() -> None:
    layers = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    assert all(isinstance(layer, BATCH_NORM) for layer in layers)
    assert not isinstance(nn.GroupNorm(1, 2), BATCH_NORM)
    assert {"running_mean", "running_var", "num_batches_tracked"} == {name for name, _ in layers[0].named_buffers()}


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_are_found(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert not has_hooks(module)
    getattr(module[0], f"register_{kind}")(lambda *_: None)
    assert has_hooks(module)
    assert has_hooks(module, passes=("backward",)) == ("backward" in kind)


def losses(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return (inputs @ weights - targets).square()


def test_a_recorded_graph_gives_losses_and_gradients() -> None:
    def rows() -> list[Tensor]:
        return [torch.randn(2, 3), torch.randn(2, 4, 3), torch.randn(2, 4), torch.rand(2, 4)]

    graph = record_gradients(losses, rows())
    weights, inputs, targets, shares = example = rows()
    errors = torch.einsum("ref,rf->re", inputs, weights) - targets
    gradients = 2 * torch.einsum("re,ref->rf", errors * shares, inputs)
    torch.testing.assert_close(graph(*example), ((errors.square() * shares).sum(1), gradients))


def test_a_recording_refuses_what_depends_on_values_or_has_no_batched_form() -> None:
    rows = [torch.randn(2, 3), torch.randn(2, 4, 3), torch.randn(2, 4), torch.rand(2, 4)]
    with pytest.raises(RuntimeError, match="reads the values"):
        record_gradients(lambda w, x, y: losses(w, x, y) if w.sum() > 0 else losses(w, 2 * x, y), rows)
    with pytest.raises(RuntimeError, match="random"):
        record_gradients(lambda w, x, y: losses(w, x + torch.rand(3), y), rows)
    lstm = nn.LSTM(3, 3, batch_first=True)
    with pytest.raises(RuntimeError, match="lstm"):
        record_gradients(lambda w, x, y: lstm(x[None] * w)[0][0].sum(1), rows)


def test_work_is_counted() -> None:
    weight, inputs = torch.randn(3, 5, requires_grad=True), torch.randn(4, 3)
    with WorkCounter() as counter:
        (inputs @ weight).t()
    assert (counter.operations, counter.elements, counter.flops) == (1, 4 * 5, 2 * 4 * 3 * 5)
