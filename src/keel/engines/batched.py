"""Chains of plain layers for many clients at once: losses and gradients, each client with its own weights.

Forward and backward pass are written out as batched operations. For models this small, what automatic differentiation
does around the arithmetic would cost more than the arithmetic.
"""

from collections.abc import Callable, Iterator

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
    return known and flat and not _reused(module)


class Chain:
    """Cross entropy and its gradients for a chain of layers.

    `weights` has a row for each client, `inputs`, `targets` and `shares` (of each example in its client's mean) a row
    of examples for each.
    """

    def __init__(self, model: FlatModel):
        self.sizes = model.sizes
        self.layers = list(_layers(model.module, ""))
        self.place = {name: number for number, name in enumerate(model.names)}

    def __call__(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's loss and gradient."""
        own = torch.split(weights, self.sizes, dim=1)
        outputs, seen = inputs, []
        for prefix, layer in self.layers:
            before = outputs
            if isinstance(layer, nn.Linear):
                outputs = self._linear(own, prefix, layer, before)
            else:
                outputs = before.flatten(2) if isinstance(layer, nn.Flatten) else layer(before)
            seen.append((before, outputs))
        logs = torch.log_softmax(outputs, 2)
        right = targets.unsqueeze(2)
        losses = -(logs.gather(2, right).squeeze(2) * shares).sum(1)
        upstream = logs.exp_().scatter_add_(2, right, torch.full_like(right, -1, dtype=torch.float32))
        return losses, self._backward(weights, own, seen, upstream.mul_(shares.unsqueeze(2)))

    def _linear(self, own: tuple[Tensor, ...], prefix: str, layer: nn.Linear, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1, -2)
        weight = self._parameter(own, prefix, "weight", layer).transpose(1, 2)
        if layer.bias is None:
            rows = torch.bmm(rows, weight)
        else:
            rows = torch.baddbmm(self._parameter(own, prefix, "bias", layer).unsqueeze(1), rows, weight)
        return rows.view(*inputs.shape[:-1], layer.out_features)

    def _backward(
        self, weights: Tensor, own: tuple[Tensor, ...], seen: list[tuple[Tensor, Tensor]], upstream: Tensor
    ) -> Tensor:
        gradients = torch.empty_like(weights)
        parts = torch.split(gradients, self.sizes, dim=1)
        for (prefix, layer), (before, after) in zip(reversed(self.layers), reversed(seen), strict=True):
            if isinstance(layer, nn.Linear):
                rows = upstream.flatten(1, -2)
                if (place := self.place.get(f"{prefix}weight")) is not None:
                    product = torch.bmm(rows.transpose(1, 2), before.flatten(1, -2))
                    parts[place].view_as(product).copy_(product)
                if (place := self.place.get(f"{prefix}bias")) is not None:
                    torch.sum(rows, 1, out=parts[place])
                if layer is not self.layers[0][1]:
                    weight = self._parameter(own, prefix, "weight", layer)
                    upstream = torch.bmm(rows, weight).view_as(before)
            elif isinstance(layer, nn.Flatten):
                upstream = upstream.view_as(before)
            else:
                upstream = BACKWARD[type(layer)](upstream, after)
        return gradients

    def _parameter(self, own: tuple[Tensor, ...], prefix: str, name: str, layer: nn.Linear) -> Tensor:
        """With a row for each client; a frozen one is everybody's."""
        shape = getattr(layer, name).shape
        if (place := self.place.get(f"{prefix}{name}")) is None:
            return getattr(layer, name).detach().expand(len(own[0]), *shape)
        return own[place].view(len(own[0]), *shape)


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
