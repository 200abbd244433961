"""LeNet and ResNet-20 compared with naive implementations from their papers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, group_norm, linear

from keel.models import build

IMAGES = 20
"""A minibatch large enough for the Fourier transform in both networks."""


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 16, 19)])
def test_lenet_equals_the_network_with_relu_before_pooling(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = build("lenet", shape, 10, {})
    conv1, pool1, relu1, conv2, pool2, relu2, *rest = ours.children()
    direct = nn.Conv2d(64, 64, 5)
    direct.load_state_dict(conv2.state_dict())
    published = nn.Sequential(conv1, relu1, pool1, direct, relu2, pool2, *rest)
    images = torch.randn(IMAGES, *shape)
    outputs = [net(images) for net in (ours, published)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5 * outputs[1].abs().max().item())
    gradients = [
        torch.autograd.grad(output.pow(2).sum(), list(net.parameters()))
        for net, output in zip((ours, published), outputs, strict=True)
    ]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def naive_resnet20(weights: list[Tensor], images: Tensor) -> Tensor:
    """ResNet-20 with option A shortcuts: a loop over 19 convolutions that uses the weights in order."""
    remaining = iter(weights)

    def normalised(x: Tensor, stride: int) -> Tensor:
        return group_norm(conv2d(x, next(remaining), stride=stride, padding=1), 2, next(remaining), next(remaining))

    x = normalised(images, 1).clamp(min=0)
    for block in range(9):
        downsamples = block in (3, 6)
        y = normalised(x, 2 if downsamples else 1).clamp(min=0)
        y = normalised(y, 1)
        if downsamples:
            batch, channels, height, width = y.shape
            shortcut = torch.zeros(batch, channels, height, width)
            for row in range(height):
                for column in range(width):
                    shortcut[:, channels // 4 : 3 * channels // 4, row, column] = x[:, :, 2 * row, 2 * column]
            x = shortcut
        x = (x + y).clamp(min=0)
    outputs = linear(x.mean((2, 3)), next(remaining), next(remaining))
    assert next(remaining, None) is None
    return outputs


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 13, 10)])
def test_resnet20_equals_its_naive_implementation(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = build("resnet20", shape, 10, {})
    with torch.no_grad():
        for (
            parameter
        ) in module.parameters():  # the initial normalisation is the identity, which would hide swapped weights
            parameter.add_(0.1 * torch.randn_like(parameter))
        images = torch.randn(IMAGES, *shape)
        expected = naive_resnet20(list(module.parameters()), images)
        torch.testing.assert_close(module(images), expected, rtol=1e-5, atol=1e-5)


def test_resnet20_starts_from_he_s_normal_draws() -> None:
    torch.manual_seed(0)
    weights = [p for p in build("resnet20", (3, 32, 32), 100, {}).parameters() if p.dim() > 1]
    assert len(weights) == 20
    for weight in weights:
        inputs = weight[0].numel()
        assert weight.std().item() == pytest.approx((2 / inputs) ** 0.5, rel=0.15)
        assert weight.abs().max() > 2.2 * weight.std()  # no uniform draw reaches that far
