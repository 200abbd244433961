from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from keel.core.flat_model import FlatModel
from keel.engines.chain import Chain, is_chain

MODULES = {
    "linear": nn.Linear(6, 3),
    "no bias": nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
    "nested": nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 4), nn.Sigmoid()), nn.Linear(4, 3)),
    "deep": nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.ReLU()),
    "deep rows": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
}


def naive(model: FlatModel, weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor):
    """Return losses and gradients of one client after the other, by autograd."""
    losses, gradients = [], []
    for row in range(len(weights)):
        leaf = weights[row].clone().requires_grad_()
        examples = cross_entropy(model.at(leaf, inputs[row]), targets[row], reduction="none")
        loss = (examples * shares[row]).sum()
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_each_row_gives_the_loss_and_gradient_of_the_module_with_its_weights(name: str, frozen: bool) -> None:
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
    for result, expected in zip(
        Chain(model)(weights, inputs, targets, shares), naive(model, weights, inputs, targets, shares), strict=True
    ):
        torch.testing.assert_close(result, expected)


def test_other_modules_are_not_chains() -> None:
    twice = nn.Linear(6, 6)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    others = [nn.Sequential(twice, twice), tied, nn.Conv2d(1, 1, 1), nn.Sequential(nn.Flatten(0), nn.Linear(6, 3))]
    assert not any(map(is_chain, [*others, nn.Sequential(nn.Linear(6, 6), nn.Dropout())]))


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_a_module_with_hooks_is_not_a_chain(kind: str) -> None:
    module = deepcopy(MODULES["nested"])
    hook = getattr(module[1][0], f"register_{kind}")(lambda *_: None)
    assert not is_chain(module)
    hook.remove()
    assert is_chain(module)
