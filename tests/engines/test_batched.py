import pytest
import torch
from torch import nn

from keel.engines.batched import batched, is_plain
from keel.params import FlatModel

MODULES = {
    "linear": nn.Linear(6, 3),
    "no bias": nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
    "nested": nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 4), nn.GELU()), nn.Linear(4, 3)),
    "norm": nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)),
    "norm without weights": nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3), nn.Sigmoid()),
    "norm over two": nn.Sequential(nn.LayerNorm((2, 3)), nn.Flatten(), nn.Linear(6, 3)),
    "deep rows": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_each_row_is_the_module_with_that_rows_weights(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]
    model = FlatModel(module)
    weights = model.weights + 0.3 * torch.randn(4, model.size)
    shape = (2, 3) if name in ("norm over two", "deep rows", "nested") else (6,)
    inputs = torch.randn(4, 5, *shape)
    assert is_plain(module)
    outputs = batched(model)(weights, inputs)
    for row in range(4):
        torch.testing.assert_close(outputs[row], model.at(weights[row], inputs[row]))


def test_frozen_parameters_are_everybodys() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    model = FlatModel(module)
    weights, inputs = torch.randn(2, model.size), torch.randn(2, 5, 6)
    outputs = batched(model)(weights, inputs)
    for row in range(2):
        torch.testing.assert_close(outputs[row], model.at(weights[row], inputs[row]))


def test_what_is_not_a_plain_chain_is_left_to_vmap() -> None:
    twice = nn.Linear(6, 6)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    others = [nn.Sequential(twice, twice), tied, nn.Conv2d(1, 1, 1), nn.Sequential(nn.Flatten(0), nn.Linear(6, 3))]
    assert not any(map(is_plain, [*others, nn.Sequential(nn.Linear(6, 6), nn.Dropout())]))
