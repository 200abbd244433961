"""LeNet and ResNet-20 compared with naive implementations from their papers."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d, group_norm, linear

from keel.models import build
from keel.models.fourier import FourierConv2d, convolution, min_batch

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


@pytest.mark.parametrize(
    ("image", "side", "padding"),
    [
        ((14, 14), 5, 0),
        ((13, 14), 5, 0),
        ((12, 15), 3, 1),
        ((8, 8), 3, 1),
        ((9, 7), 2, 0),
        ((6, 6), 6, 0),
        ((5, 6), 5, 2),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_with_the_fourier_transform_equals_the_direct_one(
    image: tuple[int, int], side: int, padding: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = FourierConv2d(6, 7, side, image, padding=padding, bias=bias)
    layer.min_batch = 1
    images = torch.randn(4, 6, *image, requires_grad=True)
    direct = conv2d(images.double(), layer.weight.double(), _double(layer.bias), padding=padding)
    monkeypatch.setattr(nn.Conv2d, "forward", None)  # the Fourier transform must be used
    ours = layer(images)
    upstream = torch.randn_like(ours)
    variables = (images, *layer.parameters())
    torch.testing.assert_close(ours.double(), direct, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(y, variables, upstream.to(y.dtype)) for y in (ours, direct))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def _double(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.double()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_fourier_transform_keeps_the_memory_format_and_supports_vmap(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    layer = FourierConv2d(64, 64, 5, (14, 14))
    images = torch.randn(3, 8, 64, 14, 14)
    one = layer(images[0].contiguous(memory_format=layout))
    assert one.is_contiguous(memory_format=layout)
    weights = torch.randn(3, *layer.weight.shape)
    gradients = vmap(grad(lambda w, x: functional_call(layer, {"weight": w}, (x,)).pow(2).sum()))(weights, images)
    for w, x, actual in zip(weights, images, gradients, strict=True):
        expected = grad(lambda w, x=x: conv2d(x, w, layer.bias).pow(2).sum())(w)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_the_fourier_transform_is_used_where_it_saves_work() -> None:
    convolutions = [layer for layer in build("resnet20", (3, 32, 32), 10, {}).modules() if isinstance(layer, nn.Conv2d)]
    assert sum(isinstance(layer, FourierConv2d) for layer in convolutions) == 5
    assert isinstance(build("lenet", (3, 32, 32), 10, {})[3], FourierConv2d)
    for inputs, image in ((64, (6, 6)), (3, (32, 32)), (64, (2, 2))):
        assert type(convolution(inputs, 64, 5, image)) is nn.Conv2d
    assert min_batch(64, 64, 5, (14, 14)) == 6
    assert min_batch(64, 64, 3, (8, 8), padding=1) == 15


@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [
        ((5, 64, 14, 14), torch.float32, "cpu"),  # a small minibatch
        ((0, 64, 14, 14), torch.float32, "cpu"),
        ((8, 64, 15, 14), torch.float32, "cpu"),  # another image size
        ((64, 14, 14), torch.float32, "cpu"),
        ((8, 64, 14, 14), torch.float64, "cpu"),
        ((8, 64, 14, 14), torch.float32, "meta"),
    ],
)
def test_the_direct_convolution_is_used_otherwise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    layer = FourierConv2d(64, 64, 5, (14, 14)).to(device, dtype)
    images = torch.randn(shape, dtype=dtype, device=device)
    ours, direct = layer(images), conv2d(images, layer.weight, layer.bias)
    assert ours.shape == direct.shape
    assert device == "meta" or torch.equal(ours, direct)


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
