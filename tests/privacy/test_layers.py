"""Gradients layer by layer are those of the whole model, or the model is not computed layer by layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keel.config.defaults import make_spec
from keel.core.examples import Examples
from keel.core.flat_model import FlatModel
from keel.core.losses import per_example_cross_entropy
from keel.core.mechanisms import Sender
from keel.models import build as build_model
from keel.models.normalisation import group_norm
from keel.privacy.examples import PrivateGradient
from keel.privacy.layers import Convolution, Layered, Linear, Stored, is_layered, layer_by_layer, whole_model
from keel.runs.build import build, make_task

EXAMPLES = 6


class Residual(nn.Module):
    """In-place activations and a residual connection, as in ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = F.relu(self.norm(x) + self.second(x), inplace=True)
        return self.head(x.mean((2, 3)))


class Positions(nn.Module):
    """A linear layer that is applied at each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.norm(self.embedding(x)))).mean(1))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.relu(self.inner(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(torch.relu(self.inner(x))))


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.shift)


class PassesBy(nn.Module):
    """The weight is used a second time, which no call of the layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + x @ self.inner.weight.T)


class Centred(nn.Module):
    """Each output depends on all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.head(torch.tanh(x - x.mean(0)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x[:, None])[0][:, -1])


def images() -> Tensor:
    return torch.randn(EXAMPLES, 3, 8, 8)


def vectors() -> Tensor:
    return torch.randn(EXAMPLES, 6)


LAYERED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (Residual, images),
    "positions": (Positions, lambda: torch.randint(0, 7, (EXAMPLES, 3))),
    "lenet": (lambda: build_model("lenet", (3, 20, 20), 5, {}), lambda: torch.randn(EXAMPLES, 3, 20, 20)),
    "resnet": (
        lambda: group_norm(build_model("resnet20", (3, 16, 16), 5, {})),
        lambda: torch.randn(EXAMPLES, 3, 16, 16),
    ),
    "channels": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3),
            nn.Tanh(),  # 6 x 6 pixels
            nn.Conv2d(64, 64, (3, 5), padding=(1, 0)),
            nn.Tanh(),  # 6 x 2
            nn.Conv2d(64, 64, (5, 2), padding=(0, 1), bias=False),
            nn.Tanh(),  # 2 x 3
            nn.Flatten(),
            nn.Linear(384, 5),
        ),
        images,
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 5)), vectors),
    "strides": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1, groups=3, padding_mode="reflect"), nn.Flatten(), nn.Linear(96, 5)
        ),
        images,
    ),
    "frozen bias": (lambda: frozen(nn.Linear(6, 5), "bias"), vectors),
}
NOT_LAYERED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "twice": (Twice, vectors),
    "tied": (Tied, vectors),
    "own parameter": (OwnParameter, vectors),
    "passes by": (PassesBy, vectors),
    "centred": (Centred, vectors),
    "recurrent": (Recurrent, vectors),
    "functional dropout": (lambda: nn.Sequential(nn.Linear(6, 9), FunctionalDropout(), nn.Linear(9, 5)), vectors),
}


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def frozen(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def problem(make: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> tuple[FlatModel, Tensor, Tensor]:
    torch.manual_seed(0)
    return FlatModel(make()), inputs(), torch.arange(EXAMPLES) % 5


@pytest.mark.parametrize("name", LAYERED)
def test_gradients_by_layer_are_those_of_the_whole_model(name: str) -> None:
    model, inputs, targets = problem(*LAYERED[name])
    assert is_layered(model, per_example_cross_entropy, Examples(inputs, targets))
    if name == "dropout":
        return  # its masks differ
    point = model.weights + 0.01 * torch.randn_like(model.weights)  # not the weights that the module has
    factors = torch.rand(EXAMPLES)
    losses, by_layer = layer_by_layer(model, per_example_cross_entropy, point, inputs, targets)
    expected, whole = whole_model(model, per_example_cross_entropy, point, inputs, targets)
    if name == "channels":
        assert isinstance(by_layer, Layered)
        assert [type(layer) for layer in by_layer.layers] == [Stored, Convolution, Convolution, Linear]
    assert torch.allclose(losses, expected, rtol=1e-4)
    assert torch.allclose(by_layer.norms, whole.norms, rtol=1e-4)
    assert torch.allclose(by_layer.weighted_sum(factors), whole.weighted_sum(factors), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NOT_LAYERED)
def test_other_models_are_computed_as_a_whole(name: str) -> None:
    model, inputs, targets = problem(*NOT_LAYERED[name])
    assert not is_layered(model, per_example_cross_entropy, Examples(inputs, targets))


def test_a_loss_that_mixes_examples_is_computed_for_each_alone() -> None:
    def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
        return per_example_cross_entropy(outputs - outputs.mean(0), targets)

    model, inputs, targets = problem(lambda: nn.Linear(6, 5), vectors)
    assert not is_layered(model, contrastive, Examples(inputs, targets))
    assert not is_layered(model, per_example_cross_entropy, Examples(inputs[:1], targets[:1]))  # cannot be seen in one


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("name", ["residual", "positions", "lenet", "channels"])
def test_no_example_changes_the_sum_by_more_than_the_clipping_norm(name: str, layered: bool) -> None:
    """The adversarial pair at the level of examples: one with an enormous gradient, or a broken one, or none."""
    model, inputs, targets = problem(*LAYERED[name])
    mechanism = PrivateGradient(clip=0.3, noise=0.0, batch=1, layered=layered)

    def total(inputs: Tensor, targets: Tensor) -> Tensor:
        return mechanism.gradient(model, per_example_cross_entropy, model.weights, inputs, targets, Sender(0, 1, 2), 0)[
            1
        ]

    without, changes = total(inputs[1:], targets[1:]), list[float]()
    for scale in (1.0, 1e6, 1e30, float("nan")):
        changed = inputs.clone()
        if inputs.is_floating_point():
            changed[0] *= scale
        changes.append(float((total(changed, targets) - without).norm()))
    assert max(changes) == pytest.approx(0.3, rel=1e-4)
    assert changes[-1] < 1e-6 or not inputs.is_floating_point()  # the gradient is not finite


def test_a_gradient_that_is_not_finite_is_left_out_of_a_linear_layer() -> None:
    inputs, outputs = torch.ones(3, 2), torch.ones(3, 4)
    inputs[1], outputs[1] = float("inf"), float("nan")
    weight, bias = Linear(inputs, outputs, bias=True).weighted_sums(torch.tensor([0.5, 0.0, 1.0]))
    assert torch.equal(weight, torch.full((4, 2), 1.5))
    assert torch.equal(bias, torch.full((4,), 1.5))


def test_the_norm_of_a_linear_layer_does_not_underflow() -> None:
    """A large input and a tiny gradient: the square of either is outside the range of float32."""
    layer = Linear(torch.full((1, 1), 1e20), torch.full((1, 1), 1e-25), bias=False)
    assert float(layer.squares) == pytest.approx(1e-10, rel=1e-4)


def convolution(scale: float = 1.0, of_outputs: float = 1.0) -> tuple[Convolution, Tensor]:
    """A convolution with many channels, and the gradients of its weight for each example, by the definition."""
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    inputs, outputs = torch.randn(4, 16, 4, 4), torch.randn(4, 16, 4, 4)
    patches = F.unfold(inputs.double(), 3, padding=1)
    expected = torch.einsum("nop,nkp->nok", outputs.double().flatten(2), patches) * scale * of_outputs
    return Convolution(layer, inputs * scale, outputs * of_outputs), expected


@pytest.mark.parametrize(("scale", "of_outputs"), [(1.0, 1.0), (1e25, 1e-25), (1e-25, 1e25), (1e18, 1e-30)])
def test_the_norms_of_a_convolution_neither_overflow_nor_underflow(scale: float, of_outputs: float) -> None:
    layer, expected = convolution(scale, of_outputs)
    norms = expected.flatten(1).norm(dim=1)
    assert torch.allclose(layer.squares.sqrt(), norms, rtol=1e-5, atol=0)


def test_the_norm_of_a_convolution_is_never_too_small() -> None:
    """Equal patches with gradients that cancel: the true norm is that of their rounding."""
    layer = nn.Conv2d(16, 16, 3, bias=False)
    outputs = torch.randn(200, 16, 2, 2, generator=torch.Generator().manual_seed(0))
    outputs -= outputs.mean((2, 3), keepdim=True)
    inputs = torch.rand(200, 16, 1, 1, generator=torch.Generator().manual_seed(1)).expand(200, 16, 4, 4)
    computed = Convolution(layer, inputs, outputs).squares
    patches = F.unfold(inputs.double(), 3)
    exact = torch.einsum("nop,nkp->nok", outputs.double().flatten(2), patches).square().sum((1, 2))
    assert (computed >= exact).all()


@pytest.mark.parametrize("width", [64, 512, 2048])
def test_the_norm_of_a_convolution_with_many_channels_is_never_too_small(width: int) -> None:
    """Sums of equal numbers, whose rounding has one direction."""
    layer = nn.Conv2d(width, width, 3, bias=False)
    inputs, outputs = torch.full((1, width, 3, 3), 0.7481283), torch.full((1, width, 1, 1), 0.8841109)
    inputs[0, 0, 0, 0] = outputs[0, 0, 0, 0] = 1
    assert Convolution(layer, inputs, outputs).squares.sqrt() >= inputs.double().norm() * outputs.double().norm()


def test_a_bias_whose_gradients_cancel_keeps_the_clipping_norm() -> None:
    """Inputs of 0, a bias, and a normalisation, below which the gradients of an image sum to zero but for rounding."""
    torch.manual_seed(8)
    norm = nn.GroupNorm(128, 128, affine=False)
    network = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), norm, nn.Flatten(), nn.Linear(128 * 9, 1, bias=False))
    model, mechanism = FlatModel(network), PrivateGradient(clip=0.5, noise=0.0, batch=1, layered=True)
    inputs, targets = torch.zeros(1, 128, 3, 3), torch.tensor([1e8])

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets) ** 2

    _, gradient = mechanism.gradient(model, squared, model.weights, inputs, targets, Sender(0, 1, 2), 0)
    assert gradient.double().norm() <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("norm", [0.5, 1e-3, 1e-4])
def test_a_huge_input_with_a_tiny_gradient_is_scaled_without_rounding(norm: float) -> None:
    layer, expected = convolution(1e36, 1e-3)
    total = layer.weighted_sums(norm / layer.squares.sqrt().float())[0]
    clipped = norm * expected / expected.flatten(1).norm(dim=1)[:, None, None]
    assert torch.allclose(total.flatten(1).double(), clipped.sum(0), rtol=1e-4, atol=1e-6 * norm)


def test_a_gradient_that_is_not_finite_is_left_out_of_a_convolution() -> None:
    layer, expected = convolution()
    layer.inputs[1], layer.outputs[2] = float("inf"), float("nan")
    assert torch.isfinite(layer.squares).tolist() == [True, False, False, True]
    total = layer.weighted_sums(torch.tensor([0.5, 0.0, 0.0, 1.0]))[0]
    assert torch.allclose(total.flatten(1).double(), 0.5 * expected[0] + expected[3], atol=1e-4)
    assert not layer.weighted_sums(torch.zeros(4))[0].any()


def test_convolutions_with_many_channels_and_small_images_do_not_store_gradients() -> None:
    outputs = torch.zeros(1, 64, 10, 10)
    assert Convolution.is_faster(nn.Conv2d(64, 64, 5), torch.zeros(1, 64, 14, 14), outputs)
    assert not Convolution.is_faster(nn.Conv2d(64, 64, 5, groups=2), torch.zeros(1, 64, 14, 14), outputs)
    assert not Convolution.is_faster(nn.Conv2d(3, 64, 5), torch.zeros(1, 3, 32, 32), torch.zeros(1, 64, 28, 28))


def run(engine: str, model: dict[str, Any]) -> tuple[Tensor, bool]:
    spec = make_spec(
        {
            "rounds": 2,
            "algorithm": {"name": "ghbm"},
            "data": {"clients": 20},
            "model": model,
            "participation": {"rate": 0.2},
            "local": {"steps": 3},
            "evaluation": {"every": 10, "last": 1},
            "engine": {"name": engine, "workers": 2},
            "privacy": {"mechanism": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-5},
        }
    )
    loop = build(spec, make_task(spec)).loop
    state = loop.start()
    loop.run(state)
    gradients: Any = loop.local.gradients
    return state.server["theta"], gradients.layered


def test_a_run_computes_layer_by_layer_with_equal_bits_in_all_engines() -> None:
    (serial, layered), (pool, also) = (run(engine, {"name": "mlp", "hidden": [8]}) for engine in ("serial", "pool"))
    assert layered
    assert also
    assert torch.equal(serial, pool)
