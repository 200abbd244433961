"""Gradients of single examples, layer by layer, from one forward and one backward pass over a minibatch.

Z. Bu, Y.-X. Wang, S. Zha, G. Karypis. Differentially Private Optimization on Large Model at Small Cost. ICML 2023.

The gradient of an example in a layer follows from the layer's input and the gradient of its output. In a linear layer
its norm is the product of their norms, and a weighted sum over the examples is one product of matrices.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad_and_value, vjp, vmap
from torch.nn.grad import conv2d_weight

from keel.core.devices import single_thread
from keel.core.examples import Examples
from keel.core.flat_model import FlatModel, Loss
from keel.core.losses import batched_loss
from keel.core.torch_randomness import keyed_torch_rng

log = logging.getLogger(__name__)

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
TRIED = 16
"""Examples on which the layers' gradients are compared with those of the whole model."""
TOLERANCE = 1e-3
"""The relative difference at which they are equal."""
ROUNDING = 2**-24
"""The relative error of an addition in float32."""


class ExampleGradients(Protocol):
    """The gradients of the examples of a minibatch."""

    @property
    def norms(self) -> Tensor:
        """The norm of each example's gradient."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients, each times its factor. A gradient with factor 0 is left out."""


@dataclass(frozen=True)
class Stacked:
    """Gradients of the whole model, one row per example."""

    rows: Tensor

    @property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.rows, dim=1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return (torch.where(factors[:, None] > 0, self.rows, 0.0) * factors[:, None]).sum(0)


def whole_model(
    model: FlatModel, loss: Loss, point: Tensor, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, ExampleGradients]:
    """The losses of the examples and their gradients, by vectorising over the examples."""
    batched = batched_loss(loss)

    def of_one(weights: Tensor, example: Tensor, target: Tensor) -> Tensor:
        return batched(model.at(weights, example[None]), target[None])[0]

    each = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different")
    gradients, losses = each(point, inputs.contiguous(), targets)
    return losses, Stacked(gradients)


class Layer(Protocol):
    """The gradients of a layer's parameters for the examples of a minibatch."""

    @property
    def squares(self) -> Tensor:
        """The squared norm of each example's gradient."""

    def weighted_sums(self, factors: Tensor) -> list[Tensor]:
        """As `ExampleGradients.weighted_sum`, one tensor per parameter."""


@dataclass(frozen=True)
class Linear:
    """A linear layer with one row per example: an example's gradient is an outer product."""

    inputs: Tensor
    outputs: Tensor
    """The gradients of the layer's outputs."""
    bias: bool

    @property
    def squares(self) -> Tensor:
        of_inputs = self.inputs.double().square().sum(1) + self.bias
        return of_inputs * self.outputs.double().square().sum(1)

    def weighted_sums(self, factors: Tensor) -> list[Tensor]:
        chosen = factors > 0
        outputs = self.outputs[chosen] * factors[chosen, None]
        return [outputs.T @ self.inputs[chosen], *([outputs.sum(0)] if self.bias else [])]


@dataclass(frozen=True)
class Stored:
    """Any layer: the gradients of its parameters, each with one row per example."""

    gradients: list[Tensor]

    @property
    def squares(self) -> Tensor:
        norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in self.gradients]
        return torch.stack(norms).double().square().sum(0)

    def weighted_sums(self, factors: Tensor) -> list[Tensor]:
        chosen = factors > 0
        if not chosen.all():
            return Stored([g[chosen] for g in self.gradients]).weighted_sums(factors[chosen])
        return [factors @ g.flatten(1) for g in self.gradients]


@dataclass(frozen=True)
class Convolution:
    """A convolution with many channels and small images: no gradient of an example is formed (ghost clipping).

    Z. Bu, J. Mao, S. Xu. Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
    Privacy. NeurIPS 2022. The squared norm of an example's gradient is a sum over pairs of output pixels: the
    product of their patches times the product of their gradients. The product of two patches is a sum of products of
    pixels, which are computed once for all patches.
    """

    layer: nn.Conv2d
    inputs: Tensor
    outputs: Tensor
    """The gradients of the layer's outputs."""

    @staticmethod
    def is_faster(layer: nn.Conv2d, inputs: Tensor, outputs: Tensor) -> bool:
        """By the number of multiplications: in a convolution per example one takes about a third of the time."""
        if inputs.device.type != "cpu" or (*layer.stride, *layer.dilation, layer.groups) != (1, 1, 1, 1, 1):
            return False
        places, taps = outputs.shape[2:].numel(), torch.Size(layer.kernel_size).numel()
        pixels = (inputs.shape[2] + 2 * int(layer.padding[0])) * (inputs.shape[3] + 2 * int(layer.padding[1]))
        products = pixels**2 * layer.in_channels + places**2 * layer.out_channels
        return 3 * products < places * taps * layer.in_channels * layer.out_channels

    @property
    def squares(self) -> Tensor:
        (down, across), (height, width) = map(int, self.layer.padding), self.outputs.shape[2:]
        (inputs, largest_input), (outputs, largest_output) = self.scaled_inputs, _scaled(self.outputs)
        products = _products(nn.functional.pad(inputs, (across, across, down, down)) if down or across else inputs)
        products = _sum([products[:, k : k + height, :, k : k + height] for k in range(self.layer.kernel_size[0])])
        products = _sum([products[..., k : k + width, :, k : k + width] for k in range(self.layer.kernel_size[1])])
        patches, gradients = products.flatten(1), _products(outputs).flatten(1)
        squares = (patches * gradients).sum(1, dtype=torch.float64)
        # Where terms cancel, their rounding may make a norm too large, but not too small.
        terms = self.layer.in_channels + self.layer.out_channels + sum(self.layer.kernel_size)
        squares += terms * ROUNDING * (patches.norm(dim=1) * gradients.norm(dim=1))
        squares *= (largest_input * largest_output).square()
        return squares if self.layer.bias is None else squares + self.of_bias.double().square().sum(1)

    @cached_property
    def scaled_inputs(self) -> tuple[Tensor, Tensor]:
        return _scaled(self.inputs)

    @cached_property
    def of_bias(self) -> Tensor:
        return self.outputs.sum((2, 3))

    def weighted_sums(self, factors: Tensor) -> list[Tensor]:
        chosen, (inputs, largest) = factors > 0, self.scaled_inputs
        # A factor and a gradient may be tiny where an input is huge: without its scale their product would be rounded.
        outputs = self.outputs[chosen] * (factors * largest).float()[chosen, None, None, None]
        weight = _backward(self.layer, inputs[chosen], outputs)
        return [weight, *([factors[chosen] @ self.of_bias[chosen]] if self.layer.bias is not None else [])]


@dataclass(frozen=True)
class Layered:
    """Gradients by layer; the layers have the order of the flat model."""

    layers: list[Layer]

    @property
    def norms(self) -> Tensor:
        return torch.stack([layer.squares for layer in self.layers]).sum(0).sqrt().float()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return torch.cat([part.reshape(-1) for layer in self.layers for part in layer.weighted_sums(factors)])


class NotLayered(Exception):
    """The model's gradients cannot be computed layer by layer."""


@dataclass(frozen=True)
class Call:
    """A call of a layer: its input, and the place of its output in the graph of the backward pass."""

    layer: nn.Module
    inputs: Tensor
    output: GradientEdge


def layer_by_layer(
    model: FlatModel, loss: Loss, point: Tensor, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, ExampleGradients]:
    """The losses of the examples and their gradients, for a model that `is_layered` accepts."""
    layers = _layers(model)
    if inputs.is_floating_point():
        inputs = inputs.detach().requires_grad_()  # so that the first layer's output is in the graph
    with torch.enable_grad(), _recorded([layer for layer, _ in layers]) as calls:
        losses = loss(model.at(point.detach(), inputs), targets)
        call_of = {id(call.layer): call for call in calls}
        if not len(call_of) == len(calls) == len(layers):
            raise NotLayered("a layer is not called exactly once")
        ordered = [call_of[id(layer)] for layer, _ in layers]
        gradients = torch.autograd.grad(losses.sum(), [call.output for call in ordered])
    weights, parts = model.unflatten(point.detach()), list[Layer]()
    for call, (layer, names), outputs in zip(ordered, layers, gradients, strict=True):
        of_layer = {name.rpartition(".")[2]: weights[name] for name in names}
        parts.append(_of_layer(layer, of_layer, call.inputs.detach(), outputs))
    return losses.detach(), Layered(parts)


def is_layered(model: FlatModel, loss: Loss, minibatch: Examples) -> bool:
    """Whether the layers' gradients are those of the whole model, which sees one example at a time.

    They are not if a layer is called twice, if a parameter belongs to no layer or to two, or if the model or the loss
    computes something from several examples.
    """
    if len(minibatch) < 2:
        return False
    model = model.copy()  # the user's module may count its calls
    inputs, targets = (part[:TRIED].to(model.weights.device) for part in (minibatch.inputs, minibatch.targets))
    for layer in model.module.modules():
        if isinstance(layer, DROPOUT):
            layer.eval()
    try:
        with single_thread(), keyed_torch_rng(0, "layers"):
            by_layer, whole = (of(model, loss, model.weights, inputs, targets) for of in (layer_by_layer, whole_model))
            factors = torch.rand(len(targets), device=inputs.device) + 0.5
            sums = [gradients.weighted_sum(factors) for _, gradients in (by_layer, whole)]
            pairs = [(by_layer[0], whole[0]), (by_layer[1].norms, whole[1].norms), tuple(sums)]
            return all(float((a - b).norm()) <= TOLERANCE * float(b.norm()) for a, b in pairs)
    except Exception as error:  # whatever the user's model raises here, the whole model decides whether it is an error
        log.debug("the gradients of examples are not computed layer by layer: %s", error)
        return False


def _layers(model: FlatModel) -> list[tuple[nn.Module, list[str]]]:
    """The layers with trainable parameters, and the names of these, in the order of the flat model."""
    layers = []
    for path, layer in model.module.named_modules():
        names = [name for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]
        if names and any(layer.children()):
            raise NotLayered(f"{type(layer).__name__} has parameters and layers")
        if names:
            layers.append((layer, [f"{path}.{name}" if path else name for name in names]))
    if [name for _, names in layers for name in names] != model.names:
        raise NotLayered("a parameter belongs to two layers")
    return layers


@contextmanager
def _recorded(layers: list[nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of these layers."""
    calls: list[Call] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if len(inputs) != 1 or not isinstance(output, Tensor):
            raise NotLayered(f"{type(layer).__name__} does not map a tensor to a tensor")
        if not output.requires_grad:  # of a layer with integer inputs
            output.requires_grad_()
        calls.append(Call(layer, inputs[0], get_gradient_edge(output)))

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _of_layer(layer: nn.Module, weights: dict[str, Tensor], inputs: Tensor, outputs: Tensor) -> Layer:
    """The gradients of a layer's parameters for each example, from its inputs and the gradients of its outputs."""
    complete = len(weights) == 1 + (getattr(layer, "bias", None) is not None)
    if isinstance(layer, nn.Linear) and complete:
        inputs, outputs = inputs.float(), outputs.float()
        if inputs.dim() == 2:
            return Linear(inputs, outputs, "bias" in weights)
        inputs, outputs = inputs.flatten(1, -2), outputs.flatten(1, -2)
        return Stored([outputs.mT @ inputs, *([outputs.sum(1)] if "bias" in weights else [])])
    if isinstance(layer, nn.Conv2d) and complete and layer.padding_mode == "zeros" and type(layer.padding) is tuple:
        inputs, outputs = inputs.float(), outputs.float()
        if Convolution.is_faster(layer, inputs, outputs):
            return Convolution(layer, inputs, outputs)
        # One convolution per example is faster than a grouped one, and than products with unfolded images.
        gradients = inputs.new_empty(len(inputs), *layer.weight.shape)
        for row in range(len(inputs)):
            gradients[row] = _backward(layer, inputs[row : row + 1], outputs[row : row + 1])
        return Stored([gradients, *([outputs.sum((2, 3))] if "bias" in weights else [])])

    def of_one(example: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        backward = vjp(lambda point: functional_call(layer, point, (example[None],)), weights)[1]
        return backward(gradient[None])[0]

    gradients_of = vmap(of_one)(inputs, outputs)
    return Stored([gradients_of[name] for name in weights])


def _backward(layer: nn.Conv2d, inputs: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of a convolution's weight, summed over the examples."""
    settings = layer.stride, layer.padding, layer.dilation, layer.groups
    gradient: Tensor = conv2d_weight(inputs, layer.weight.shape, outputs, *settings)  # type: ignore[no-untyped-call]
    return gradient


def _scaled(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images with values from -1 to 1, whose squares do not overflow, and the largest value of each."""
    largest = images.abs().amax((1, 2, 3)).clamp(min=torch.finfo(images.dtype).tiny)
    return images / largest[:, None, None, None], largest.double()


def _products(images: Tensor) -> Tensor:
    """For each image, the products of the channels of all pairs of pixels: (image, row, column, row, column)."""
    pixels = images.flatten(2)
    return torch.bmm(pixels.mT, pixels).view(len(images), *images.shape[2:], *images.shape[2:])


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
