"""A model as one flat vector of its trainable parameters."""

import pytest
import torch
from torch import nn

from keel import KeelError
from keel.core.flat_model import FlatModel, fingerprint


def test_parameters_are_views_of_the_flat_vector() -> None:
    model = FlatModel(nn.Linear(2, 3))
    model.weights.fill_(7.0)
    assert all((p == 7).all() for p in model.module.parameters())


def test_the_users_module_is_unchanged() -> None:
    module = nn.Linear(2, 3)
    before = module.weight.clone()
    FlatModel(module).weights.zero_()
    assert torch.equal(module.weight, before)


def test_the_gradient_is_that_of_autograd_in_the_order_of_the_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model, x = FlatModel(module), torch.randn(5, 2)
    module(x).pow(2).sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(model.gradient(model.module(x).pow(2).sum()), expected)


def test_frozen_parameters_are_not_part_of_the_vector() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    assert FlatModel(module).size == 4


def test_frozen_parameters_are_shared_with_the_module_but_not_with_the_trained_one() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    model = FlatModel(module)
    copies = model.module, model.copy().module, model.plain_module()
    shared = [[p is q for p, q in zip(copy.parameters(), module.parameters(), strict=True)] for copy in copies]
    assert shared == [[True, True, False, False], [True, True, False, False], [False] * 4]


def test_tied_parameters_count_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    model = FlatModel(module)
    model.weights.fill_(2.0)
    assert model.size == 9
    assert (model.module[1].weight == 2).all()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LazyLinear(3), "lazy layers"),
        (nn.Flatten(), "no trainable parameters"),
        (nn.Linear(2, 2).double(), "float32"),
    ],
)
def test_unsupported_models_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        FlatModel(module)


def test_fingerprints_differ_by_a_bit() -> None:
    one = torch.ones(3)
    assert fingerprint(one) == fingerprint(one.clone())
    assert fingerprint(one) != fingerprint(one.nextafter(torch.tensor(2.0)))
