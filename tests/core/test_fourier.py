"""Convolutions with the Fourier transform equal direct ones to rounding, and are used where they are faster."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d

from keel.core import fourier
from keel.core.flat_model import FlatModel
from keel.core.fourier import FourierConv2d, min_batch


@pytest.fixture(autouse=True)
def no_cached_plans() -> Iterator[None]:
    yield
    fourier._plan.cache_clear()


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
    layer = FourierConv2d(6, 7, side, padding=padding, bias=bias)
    monkeypatch.setattr(fourier, "min_batch", lambda *_: 1)
    fourier._plan.cache_clear()
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
    layer = FourierConv2d(64, 64, 5)
    images = torch.randn(3, 12, 64, 14, 14)
    one = layer(images[0].contiguous(memory_format=layout))
    assert one.is_contiguous(memory_format=layout)
    weights = torch.randn(3, *layer.weight.shape)
    gradients = vmap(grad(lambda w, x: functional_call(layer, {"weight": w}, (x,)).pow(2).sum()))(weights, images)
    for w, x, actual in zip(weights, images, gradients, strict=True):
        expected = grad(lambda w, x=x: conv2d(x, w, layer.bias).pow(2).sum())(w)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_the_fourier_transform_is_used_where_it_saves_work() -> None:
    assert min_batch(64, 64, 5, (14, 14)) == 11
    assert min_batch(64, 64, 3, (8, 8), padding=1) == 30
    for inputs, image in ((64, (6, 6)), (3, (14, 14)), (64, (2, 2)), (16, (14, 14))):
        assert min_batch(inputs, 64, 5, image) is None


class Classifier(nn.Module):
    """A user's class with convolutions of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 64, 3), nn.Conv2d(64, 64, 5)
        self.strided, self.grouped = nn.Conv2d(64, 64, 3, stride=2), nn.Conv2d(64, 64, 3, groups=2)
        self.oblong, self.same = nn.Conv2d(64, 64, (3, 5)), nn.Conv2d(64, 64, 3, padding="same")


def test_a_users_convolutions_are_replaced_in_the_copy_that_is_trained() -> None:
    module = Classifier()
    model = FlatModel(module)
    fast = {name for name, layer in model.module.named_modules() if isinstance(layer, FourierConv2d)}
    assert fast == {"first", "second"}
    assert not any(isinstance(layer, FourierConv2d) for layer in module.modules())
    assert {type(layer) for layer in model.plain_module().children()} == {nn.Conv2d}
    assert list(module.state_dict()) == list(model.module.state_dict())


@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [
        ((10, 64, 14, 14), torch.float32, "cpu"),  # a small minibatch
        ((0, 64, 14, 14), torch.float32, "cpu"),
        ((16, 64, 6, 6), torch.float32, "cpu"),  # a small image
        ((64, 14, 14), torch.float32, "cpu"),
        ((16, 64, 14, 14), torch.float64, "cpu"),
        ((16, 64, 14, 14), torch.float32, "meta"),
    ],
)
def test_the_direct_convolution_is_used_otherwise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    layer = FourierConv2d(64, 64, 5).to(device, dtype)
    images = torch.randn(shape, dtype=dtype, device=device)
    ours, direct = layer(images), conv2d(images, layer.weight, layer.bias)
    assert ours.shape == direct.shape
    assert device == "meta" or torch.equal(ours, direct)


def test_bfloat16_and_replaced_computations_are_left_alone() -> None:
    torch.manual_seed(0)
    layer, images = nn.Conv2d(64, 64, 5), torch.randn(16, 64, 14, 14)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(images)
    assert torch.equal(FlatModel(layer, precision="bf16").outputs(images), expected.float())
    layer._conv_forward = lambda *_: torch.zeros(16, 64, 10, 10)
    assert not FlatModel(layer).outputs(images).any()
