from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from keel.engines.batched import Chain, is_chain
from keel.params import FlatModel

MODULES = {
    "linear": nn.Linear(6, 3),
    "no bias": nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
    "nested": nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 4), nn.Sigmoid()), nn.Linear(4, 3)),
    "deep": nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.ReLU()),
    "deep rows": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
}


def naive(model: FlatModel, weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor):
    """One client after the other, by automatic differentiation."""
    losses, gradients = [], []
    for row in range(len(weights)):
        leaf = weights[row].clone().requires_grad_()
        each = cross_entropy(model.at(leaf, inputs[row]), targets[row], reduction="none")
        loss = (each * shares[row]).sum()
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_each_row_is_the_module_with_that_rows_weights(name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    module = deepcopy(MODULES[name])
    if frozen:
        next(module.parameters()).requires_grad_(False)
    model = FlatModel(module)
    weights = model.weights + 0.3 * torch.randn(4, model.size)
    shape = (2, 3) if name in ("deep rows", "nested") else (6,)
    inputs, targets = torch.randn(4, 5, *shape), torch.randint(0, 3, (4, 5))
    shares = torch.rand(4, 5)
    assert is_chain(module)
    for found, expected in zip(
        Chain(model)(weights, inputs, targets, shares), naive(model, weights, inputs, targets, shares), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_what_is_not_a_plain_chain_is_left_to_vmap() -> None:
    twice = nn.Linear(6, 6)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    others = [nn.Sequential(twice, twice), tied, nn.Conv2d(1, 1, 1), nn.Sequential(nn.Flatten(0), nn.Linear(6, 3))]
    assert not any(map(is_chain, [*others, nn.Sequential(nn.Linear(6, 6), nn.Dropout())]))


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_a_chain_with_hooks_is_none(kind: str) -> None:
    module = deepcopy(MODULES["nested"])
    hook = getattr(module[1][0], f"register_{kind}")(lambda *_: None)
    assert not is_chain(module)
    hook.remove()
    assert is_chain(module)
