"""Batched losses and gradients of chains of plain layers, with different weights for each client.

Forward and backward pass are written as batched operations. For models this small the overhead of autograd would exceed
the arithmetic, and so would slicing the weights into views at each step: the views are made once per weight matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keel.core.flat_model import FlatModel
from keel.core.torch_adapter import BACKWARD, has_hooks


def is_chain(module: nn.Module) -> bool:
    """Return whether a module is a chain of linear layers and activations, each used once and without hooks."""
    layers = list(module.modules())
    plain = all(type(layer) in (nn.Sequential, nn.Flatten, nn.Linear, *BACKWARD) for layer in layers)
    flat = all((layer.start_dim, layer.end_dim) == (1, -1) for layer in layers if isinstance(layer, nn.Flatten))
    return plain and flat and not _reused(module) and not has_hooks(module)


class Chain:
    """The cross entropy of a chain of layers and its gradient, per client.

    `weights` has one row per client; `inputs`, `targets` and `shares` (of each example in its client's mean) have one
    row of examples per client.
    """

    def __init__(self, model: FlatModel):
        self.model = model
        self.layers = list(_layers(model.module, ""))
        self._bound: _Bound | None = None

    def __call__(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return each client's loss and gradient. The next call with the same weights overwrites the gradients."""
        if self._bound is None or self._bound.weights is not weights:
            self._bound = _Bound(weights, self.layers, self.model)
        return self._bound(inputs, targets, shares)


class _Bound:
    """A chain whose layers are views of one weight matrix and of one gradient matrix."""

    def __init__(self, weights: Tensor, layers: list[tuple[str, nn.Module]], model: FlatModel):
        self.weights, self.gradients = weights, torch.empty_like(weights)
        values = dict(zip(model.names, torch.split(weights, model.sizes, dim=1), strict=True))
        gradients = dict(zip(model.names, torch.split(self.gradients, model.sizes, dim=1), strict=True))
        self.layers = [
            _linear(prefix, layer, values, gradients) if isinstance(layer, nn.Linear) else layer
            for prefix, layer in layers
        ]
        self.minus_one = torch.empty(0)

    def __call__(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        outputs, passed = inputs, []
        for layer in self.layers:
            before = outputs
            outputs = before.flatten(2) if isinstance(layer, nn.Flatten) else layer(before)
            passed.append((before, outputs))
        logs = torch.log_softmax(outputs, 2)
        labels = targets.unsqueeze(2)
        losses = -(logs.gather(2, labels).squeeze(2) * shares).sum(1)
        if self.minus_one.shape != labels.shape:
            self.minus_one = torch.full_like(labels, -1, dtype=torch.float32)
        upstream = logs.exp_().scatter_add_(2, labels, self.minus_one).mul_(shares.unsqueeze(2))
        for layer, (before, after) in zip(reversed(self.layers), reversed(passed), strict=True):
            if isinstance(layer, _Linear):
                upstream = layer.backward(upstream, before, first=layer is self.layers[0])
            elif isinstance(layer, nn.Flatten):
                upstream = upstream.view_as(before)
            else:
                upstream = BACKWARD[type(layer)](upstream, after)
        return losses, self.gradients


@dataclass(frozen=True, eq=False)
class _Linear:
    """A linear layer of all clients. A frozen parameter has no gradient."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor | None
    weight_gradient: Tensor | None
    bias_gradient: Tensor | None

    def __call__(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1, -2)
        if self.bias is None:
            rows = torch.bmm(rows, self.transposed)
        else:
            rows = torch.baddbmm(self.bias, rows, self.transposed)
        return rows.view(*inputs.shape[:-1], rows.shape[2])

    def backward(self, upstream: Tensor, inputs: Tensor, first: bool) -> Tensor:
        """Write the gradients of the parameters and return that of the inputs, which the first layer does not need."""
        rows = upstream.flatten(1, -2)
        if self.weight_gradient is not None:
            self.weight_gradient.copy_(torch.bmm(rows.transpose(1, 2), inputs.flatten(1, -2)))  # faster than out=
        if self.bias_gradient is not None:
            torch.sum(rows, 1, out=self.bias_gradient)
        return upstream if first else torch.bmm(rows, self.weight).view_as(inputs)


def _linear(prefix: str, layer: nn.Linear, values: dict[str, Tensor], gradients: dict[str, Tensor]) -> _Linear:
    clients = len(next(iter(values.values())))

    def rows(name: str, tensors: dict[str, Tensor]) -> Tensor | None:
        shape = getattr(layer, name).shape
        return tensors[f"{prefix}{name}"].view(clients, *shape) if f"{prefix}{name}" in tensors else None

    def frozen(name: str) -> Tensor:
        value = getattr(layer, name).detach()
        return value.expand(clients, *value.shape)

    weight = rows("weight", values)
    weight = frozen("weight") if weight is None else weight
    bias = bias_gradient = None
    if layer.bias is not None:
        bias, bias_gradient = rows("bias", values), rows("bias", gradients)
        bias = (frozen("bias") if bias is None else bias).unsqueeze(1)
    return _Linear(weight, weight.transpose(1, 2), bias, rows("weight", gradients), bias_gradient)


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers in the order of the forward pass, with the prefix of their parameters' names."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _layers(child, f"{prefix}{name}.")
    else:
        yield prefix, module


def _reused(module: nn.Module) -> bool:
    """Return whether a layer or a parameter occurs twice."""
    parameters = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    layers = [id(part) for _, part in module.named_modules(remove_duplicate=False)]
    return len(set(parameters)) < len(parameters) or len(set(layers)) < len(layers)
