"""Tests of every model: its docstring, its published size, and training as a flat vector."""

import sys
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel import KeelError, models
from keel.core.flat_model import FlatModel
from keel.models import MODELS, build
from keel.models.hub import hub_network

CLASSES = 5
IMAGES, TOKENS = (3, 16, 16), (6,)
SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "linear": (IMAGES, {}),
    "mlp": (IMAGES, {}),
    "cnn": (IMAGES, {}),
    "lenet": (IMAGES, {}),
    "resnet20": (IMAGES, {}),
    "char_lstm": (TOKENS, {"embedding": 3, "hidden": 4}),
    "word_lstm": (TOKENS, {"embedding": 3, "hidden": 4}),
    "mobilenet_v2": ((3, 64, 64), {}),
    "vit_b16": (IMAGES, {"pretrained": "tiny"}),
}
"""An input shape and settings that make each model fast."""


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[FlatModel, Tensor, Tensor]:
    """A model, a batch of inputs and their labels."""
    shape, settings = SMALL[request.param]
    if request.param in ("mobilenet_v2", "vit_b16"):
        pytest.importorskip("transformers")
    if "pretrained" in settings:
        settings = {"pretrained": str(request.getfixturevalue("tiny_vit"))}
    torch.manual_seed(0)
    model = FlatModel(build(request.param, shape, CLASSES, settings))
    inputs = torch.randint(CLASSES, (4, *shape)) if shape == TOKENS else torch.randn(4, *shape)
    targets = torch.randint(CLASSES, (4, *shape) if request.param == "word_lstm" else (4,))
    return model, inputs, targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def seeded_outputs(model: FlatModel, inputs: Tensor, point: Tensor | None = None) -> Tensor:
    """Return the outputs with the same dropout masks at each call."""
    torch.manual_seed(1)
    return model.module(inputs) if point is None else model.at(point, inputs)


def test_a_gradient_step_changes_the_outputs_of_every_model(case: tuple[FlatModel, Tensor, Tensor]) -> None:
    model, inputs, targets = case
    before = seeded_outputs(model, inputs)
    assert before.shape == (*targets.shape, CLASSES)
    gradient = model.gradient(loss_of(before, targets))
    assert gradient.isfinite().all()
    assert gradient.norm() > 0
    model.weights.sub_(gradient, alpha=0.01)
    assert not torch.equal(seeded_outputs(model, inputs), before)


def test_outputs_and_gradients_at_other_weights_equal_those_of_a_model_with_these_weights(
    case: tuple[FlatModel, Tensor, Tensor],
) -> None:
    model, inputs, targets = case
    original = seeded_outputs(model, inputs)
    point = (model.weights + 0.1 * torch.randn_like(model.weights)).requires_grad_()
    functional = seeded_outputs(model, inputs, point)
    (gradient,) = torch.autograd.grad(loss_of(functional, targets), point)
    assert torch.equal(seeded_outputs(model, inputs), original)
    model.weights.copy_(point.detach())
    loaded = seeded_outputs(model, inputs)
    torch.testing.assert_close(functional, loaded)
    torch.testing.assert_close(gradient, model.gradient(loss_of(loaded, targets)))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "size"),
    [
        ("cnn", (3, 16, 16), 10, 38_570),
        ("lenet", (3, 32, 32), 10, 797_962),
        ("lenet", (1, 28, 28), 10, 573_578),
        ("resnet20", (3, 32, 32), 10, 269_722),  # 272,474 with weights in the shortcuts (option B)
        ("char_lstm", (80,), 80, 133_520),
        ("word_lstm", (20,), 10_004, 4_050_748),
        ("mobilenet_v2", (3, 224, 224), 1000, 3_504_872),
        ("vit_b16", (3, 224, 224), 1000, 86_567_656),
    ],
)
def test_models_have_the_published_number_of_parameters(
    name: str, shape: tuple[int, ...], classes: int, size: int
) -> None:
    if name in ("mobilenet_v2", "vit_b16"):
        pytest.importorskip("transformers")
    with torch.device("meta"):  # shapes without storage
        module = build(name, shape, classes, {})
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == size


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_one_line_summary(name: str) -> None:
    first = (MODELS[name].__doc__ or "").splitlines()[0]
    assert 10 < len(first) < 120
    assert first.endswith(".")


@pytest.mark.parametrize(
    ("name", "shape", "settings", "words"),
    [
        ("cnn", (1, 3, 3), {}, r"model.channels must have fewer entries for images of 3x3 pixels \(got \[16, 32\]\)"),
        ("lenet", (1, 8, 8), {}, r"model.name = 'lenet' requires images of at least 16x16 pixels \(got 8x8\)"),
        ("lenet", (3, 32, 15), {}, r"at least 16x16 pixels \(got 32x15\)"),
        ("lenet", (64,), {}, r"requires images of shape \(channels, height, width\) \(got inputs of shape \(64,\)\)"),
        ("resnet20", (8, 8), {}, "'resnet20' requires images"),
        ("mobilenet_v2", (64,), {}, "'mobilenet_v2' requires images"),
        ("vit_b16", (64,), {}, "'vit_b16' requires images"),
        ("char_lstm", (3, 32, 32), {}, "'char_lstm' requires sequences of tokens"),
        ("word_lstm", (2, 20), {}, "'word_lstm' requires sequences of tokens"),
        ("char_lstm", (20,), {"hidden": 0}, "model.hidden must be greater than or equal to 1"),
        ("word_lstm", (20,), {"embedding": "wide"}, "model.embedding must be a valid integer"),
        ("mobilenet_v2", (3, 32, 32), {"freeze": "classifier"}, "model.freeze must be a valid list"),
    ],
)
def test_inputs_and_settings_that_a_model_does_not_support_are_refused(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(KeelError, match=words):
        build(name, shape, 10, settings)


@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [
        ("mlp", IMAGES, {"hidden": [10**9]}),
        ("mlp", IMAGES, {"hidden": [10**6, 10**6]}),
        ("mlp", IMAGES, {"hidden": [2**62]}),
        ("cnn", IMAGES, {"channels": [10**9]}),
        ("char_lstm", TOKENS, {"hidden": 10**7}),
    ],
)
def test_a_model_that_exceeds_the_ram_is_refused_before_it_is_allocated(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "available_ram", lambda: 10**11)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(KeelError, match=rf"^model.name: '{name}' (with .* of RAM; use a smaller|cannot be built)"):
        build(name, shape, CLASSES, settings)
    assert getrusage(RUSAGE_SELF).ru_maxrss < before + 200_000  # kilobytes


def test_a_run_imports_no_models_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", object())  # imported, but none of its models is
    assert hub_network(nn.Linear(2, 1)) is None
