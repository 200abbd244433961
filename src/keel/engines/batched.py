"""Chains of plain layers for many clients at once: losses and gradients, each client with its own weights.

Forward and backward pass are written out as batched operations. For models this small, what automatic differentiation
does around the arithmetic would cost more than the arithmetic, and so would cutting the weights into views at each
step: that is done once for as long as the weights stay in their place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keel.params import FlatModel

BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda upstream, outputs: torch.ops.aten.threshold_backward(upstream, outputs, 0),
    nn.Tanh: torch.ops.aten.tanh_backward,
    nn.Sigmoid: torch.ops.aten.sigmoid_backward,
}
"""Of the layers without weights: the gradient before the layer from that after it and the layer's outputs."""


def is_chain(module: nn.Module) -> bool:
    """Whether a module is a chain of layers that are known here, each used once."""
    parts = list(module.modules())
    known = all(type(part) in (nn.Sequential, nn.Flatten, nn.Linear, *BACKWARD) for part in parts)
    flat = all((part.start_dim, part.end_dim) == (1, -1) for part in parts if isinstance(part, nn.Flatten))
    return known and flat and not _reused(module) and not has_hooks(module)


def has_hooks(module: nn.Module, passes: tuple[str, ...] = ("forward", "backward")) -> bool:
    """Whether a pass through a part does more than the part's class says."""
    kinds = [f"_{each}{kind}" for each in passes for kind in ("_hooks", "_pre_hooks")]
    return any(getattr(part, kind) for part in module.modules() for kind in kinds)


class Chain:
    """Cross entropy and its gradients for a chain of layers.

    `weights` has a row for each client, `inputs`, `targets` and `shares` (of each example in its client's mean) a row
    of examples for each.
    """

    def __init__(self, model: FlatModel):
        self.model = model
        self.layers = list(_layers(model.module, ""))
        self._bound: _Bound | None = None

    def __call__(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's loss and gradient, which stands until the next call with the same weights."""
        if self._bound is None or self._bound.weights is not weights:
            self._bound = _Bound(weights, self.layers, self.model)
        return self._bound(inputs, targets, shares)


class _Bound:
    """A chain whose layers see their parts of one matrix of weights, and of one of gradients."""

    def __init__(self, weights: Tensor, layers: list[tuple[str, nn.Module]], model: FlatModel):
        self.weights, self.gradients = weights, torch.empty_like(weights)
        own = dict(zip(model.names, torch.split(weights, model.sizes, dim=1), strict=True))
        slopes = dict(zip(model.names, torch.split(self.gradients, model.sizes, dim=1), strict=True))
        self.layers = [_linear(p, each, own, slopes) if isinstance(each, nn.Linear) else each for p, each in layers]
        self.minus = torch.empty(0)

    def __call__(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        outputs, seen = inputs, []
        for layer in self.layers:
            before = outputs
            outputs = before.flatten(2) if isinstance(layer, nn.Flatten) else layer(before)
            seen.append((before, outputs))
        logs = torch.log_softmax(outputs, 2)
        right = targets.unsqueeze(2)
        losses = -(logs.gather(2, right).squeeze(2) * shares).sum(1)
        if self.minus.shape != right.shape:
            self.minus = torch.full_like(right, -1, dtype=torch.float32)
        upstream = logs.exp_().scatter_add_(2, right, self.minus).mul_(shares.unsqueeze(2))
        for layer, (before, after) in zip(reversed(self.layers), reversed(seen), strict=True):
            if isinstance(layer, _Linear):
                upstream = layer.backward(upstream, before, further=layer is not self.layers[0])
            elif isinstance(layer, nn.Flatten):
                upstream = upstream.view_as(before)
            else:
                upstream = BACKWARD[type(layer)](upstream, after)
        return losses, self.gradients


@dataclass(frozen=True, eq=False)
class _Linear:
    """A linear layer of all clients; what is frozen has no gradient."""

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

    def backward(self, upstream: Tensor, inputs: Tensor, further: bool) -> Tensor:
        """Puts its gradients in their place, and gives that of its inputs (if anybody needs it)."""
        rows = upstream.flatten(1, -2)
        if self.weight_gradient is not None:
            self.weight_gradient.copy_(torch.bmm(rows.transpose(1, 2), inputs.flatten(1, -2)))  # quicker than out=
        if self.bias_gradient is not None:
            torch.sum(rows, 1, out=self.bias_gradient)
        return torch.bmm(rows, self.weight).view_as(inputs) if further else upstream


def _linear(prefix: str, layer: nn.Linear, own: dict[str, Tensor], slopes: dict[str, Tensor]) -> _Linear:
    clients = len(next(iter(own.values())))

    def rows(name: str, parts: dict[str, Tensor]) -> Tensor | None:
        shape = getattr(layer, name).shape
        return parts[f"{prefix}{name}"].view(clients, *shape) if f"{prefix}{name}" in parts else None

    def frozen(name: str) -> Tensor:
        value = getattr(layer, name).detach()
        return value.expand(clients, *value.shape)

    weight = rows("weight", own)
    weight = frozen("weight") if weight is None else weight
    bias = bias_gradient = None
    if layer.bias is not None:
        bias, bias_gradient = rows("bias", own), rows("bias", slopes)
        bias = (frozen("bias") if bias is None else bias).unsqueeze(1)
    return _Linear(weight, weight.transpose(1, 2), bias, rows("weight", slopes), bias_gradient)


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers in the order in which a chain runs them, with what their parameters' names begin with."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _layers(child, f"{prefix}{name}.")
    else:
        yield prefix, module


def _reused(module: nn.Module) -> bool:
    """Whether a layer or a parameter occurs twice."""
    parameters = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    layers = [id(part) for _, part in module.named_modules(remove_duplicate=False)]
    return len(set(parameters)) < len(parameters) or len(set(layers)) < len(layers)
