"""LeNet and ResNet-20 against restatements from their papers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, group_norm, linear

from keel.models import build


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 16, 19)])
def test_lenet_is_the_network_that_rectifies_before_it_pools(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = build("lenet", shape, 10, {})
    conv1, pool1, relu1, conv2, pool2, relu2, *rest = ours.children()
    published = nn.Sequential(conv1, relu1, pool1, conv2, relu2, pool2, *rest)
    images = torch.randn(4, *shape)
    assert torch.equal(ours(images), published(images))
    gradients = [torch.autograd.grad(net(images).pow(2).sum(), list(ours.parameters())) for net in (ours, published)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)


def naive_resnet20(weights: list[Tensor], images: Tensor) -> Tensor:
    """ResNet-20 with option A shortcuts, a loop over 19 convolutions that takes the weights in their order."""
    left = iter(weights)

    def normalised(x: Tensor, stride: int) -> Tensor:
        return group_norm(conv2d(x, next(left), stride=stride, padding=1), 2, next(left), next(left))

    x = normalised(images, 1).clamp(min=0)
    for block in range(9):
        narrows = block in (3, 6)
        y = normalised(x, 2 if narrows else 1).clamp(min=0)
        y = normalised(y, 1)
        if narrows:
            batch, channels, height, width = y.shape
            shortcut = torch.zeros(batch, channels, height, width)
            for row in range(height):
                for column in range(width):
                    shortcut[:, channels // 4 : 3 * channels // 4, row, column] = x[:, :, 2 * row, 2 * column]
            x = shortcut
        x = (x + y).clamp(min=0)
    outputs = linear(x.mean((2, 3)), next(left), next(left))
    assert next(left, None) is None
    return outputs


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 13, 10)])
def test_resnet20_is_its_naive_restatement(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = build("resnet20", shape, 10, {})
    with torch.no_grad():
        for parameter in module.parameters():  # normalisation starts as the identity, which would hide a swap
            parameter.add_(0.1 * torch.randn_like(parameter))
        images = torch.randn(2, *shape)
        expected = naive_resnet20(list(module.parameters()), images)
        torch.testing.assert_close(module(images), expected, rtol=1e-4, atol=1e-4)


def test_resnet20_starts_from_he_s_normal_draws() -> None:
    torch.manual_seed(0)
    weights = [p for p in build("resnet20", (3, 32, 32), 100, {}).parameters() if p.dim() > 1]
    assert len(weights) == 20
    for weight in weights:
        inputs = weight[0].numel()
        assert weight.std().item() == pytest.approx((2 / inputs) ** 0.5, rel=0.15)
        assert weight.abs().max() > 2.2 * weight.std()  # no uniform draw reaches that far
