"""Each private or experimental interface of PyTorch that Keel uses, by itself: a failure names the one that broke.

The compiler takes 20 s: it is tested once, in tests/engines/test_compiled.py.
"""

import pytest
import torch
from torch import Tensor, nn

from keel.core.torch_adapter import BACKWARD, BATCH_NORM, has_hooks, trace_gradients


def test_batch_norm_layers_have_one_base_class() -> None:
    layers = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    assert all(isinstance(layer, BATCH_NORM) for layer in layers)
    assert not isinstance(nn.GroupNorm(1, 2), BATCH_NORM)
    assert {"running_mean", "running_var", "num_batches_tracked"} == {name for name, _ in layers[0].named_buffers()}


@pytest.mark.parametrize("kind", BACKWARD)
def test_backward_operators_of_activations_are_those_of_autograd(kind: type[nn.Module]) -> None:
    inputs, upstream = torch.randn(20, requires_grad=True), torch.randn(20)
    outputs = kind()(inputs)
    (expected,) = torch.autograd.grad(outputs, inputs, upstream)
    torch.testing.assert_close(BACKWARD[kind](upstream, outputs.detach()), expected)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_are_found(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert not has_hooks(module)
    getattr(module[0], f"register_{kind}")(lambda *_: None)
    assert has_hooks(module)
    assert has_hooks(module, passes=("backward",)) == ("backward" in kind)


def loss(weights: Tensor, inputs: Tensor) -> Tensor:
    return ((inputs @ weights) ** 2).sum()


def example() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return two rows of weights and inputs, and their gradients and losses."""
    weights, inputs = torch.randn(2, 3), torch.randn(2, 4, 3)
    outputs = torch.einsum("ref,rf->re", inputs, weights)
    return [weights, inputs], 2 * torch.einsum("re,ref->rf", outputs, inputs), (outputs**2).sum(1)


def test_a_traced_graph_gives_gradients_and_losses() -> None:
    rows, gradients, losses = example()
    result = trace_gradients(loss, rows)(*rows)
    torch.testing.assert_close(result, (gradients, losses))
