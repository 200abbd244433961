"""Replacement of batch normalisation by group normalisation."""

import pytest
import torch
from torch import nn

from keel.models.normalisation import group_norm


def network() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=1e-3), nn.ReLU())
    module = nn.Sequential(inner, nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5, affine=False))
    nn.init.normal_(inner[1].weight)
    nn.init.normal_(inner[1].bias)
    return module


def test_each_batch_norm_becomes_a_group_norm_with_its_weights() -> None:
    module = network()
    grouped = group_norm(module)
    even, odd = grouped[0][1], grouped[2]
    assert (even.num_groups, even.num_channels, even.eps) == (2, 6, 1e-3)
    assert torch.equal(even.weight, module[0][1].weight)
    assert torch.equal(even.bias, module[0][1].bias)
    assert (odd.num_groups, odd.num_channels, odd.affine) == (1, 5, False)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in grouped.modules())
    assert not list(grouped.buffers())
    assert [name for name, _ in grouped.named_parameters()] == [name for name, _ in module.named_parameters()]


def test_outputs_are_normalised_in_two_groups_of_channels() -> None:
    x = torch.randn(4, 6, 5, 5)
    groups = x.unflatten(1, (2, 3)).flatten(2)
    expected = (groups - groups.mean(2, keepdim=True)) / groups.var(2, keepdim=True, unbiased=False).sqrt()
    torch.testing.assert_close(group_norm(nn.BatchNorm2d(6, eps=0.0))(x), expected.view_as(x), rtol=1e-4, atol=1e-4)


def test_the_original_module_is_not_changed() -> None:
    module = network()
    group_norm(module)[0][1].weight.data.zero_()
    assert isinstance(module[0][1], nn.BatchNorm2d)
    assert module[0][1].weight.any()


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_single_batch_norm_of_any_dimension_is_replaced(layer: type[nn.Module]) -> None:
    grouped = group_norm(layer(4).eval().requires_grad_(False))
    assert isinstance(grouped, nn.GroupNorm)
    assert not grouped.training
    assert not grouped.weight.requires_grad


def test_a_layer_that_is_used_twice_stays_one_layer() -> None:
    shared = nn.BatchNorm1d(4)
    grouped = group_norm(nn.Sequential(shared, nn.Linear(4, 4), shared))
    assert grouped[0] is grouped[2]
    assert isinstance(grouped[0], nn.GroupNorm)
