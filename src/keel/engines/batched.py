"""Plain layers for many clients at once: the same layer with each client's own weights, as one batched operation."""

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from keel.params import FlatModel

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
PLAIN = (nn.Sequential, nn.Flatten, nn.Linear, nn.LayerNorm, *ELEMENTWISE)

Forward = Callable[[Tensor, Tensor], Tensor]
"""(clients, parameters) weights and (clients, batch, ...) inputs to (clients, batch, ...) outputs."""


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a chain of layers that are known here, each used once."""
    parts = list(module.modules())
    flat = all((part.start_dim, part.end_dim) == (1, -1) for part in parts if isinstance(part, nn.Flatten))
    return all(type(part) in PLAIN for part in parts) and flat and not _reused(module)


def batched(model: FlatModel) -> Forward:
    """The forward pass of a plain module."""
    offsets = dict(zip(model.names, accumulate([0, *model.sizes]), strict=False))
    layers = list(_chain(model.module, ""))

    def forward(weights: Tensor, inputs: Tensor) -> Tensor:
        # One split, whose backward pass is one concatenation.
        parts = dict(zip(offsets, torch.split(weights, model.sizes, dim=1), strict=True))

        def own(layer: nn.Module, prefix: str, name: str) -> Tensor:
            """A parameter with a row for each client; a frozen one is everybody's."""
            shared = getattr(layer, name)
            if (part := parts.get(f"{prefix}{name}")) is None:
                return shared.detach().expand(len(weights), *shared.shape)
            return part.view(len(weights), *shared.shape)

        outputs = inputs
        for prefix, layer in layers:
            match layer:
                case nn.Flatten():
                    outputs = outputs.flatten(2)
                case nn.Linear():
                    rows = outputs.flatten(1, -2)
                    weight = own(layer, prefix, "weight").transpose(1, 2)
                    if layer.bias is None:
                        rows = torch.bmm(rows, weight)
                    else:
                        rows = torch.baddbmm(own(layer, prefix, "bias").unsqueeze(1), rows, weight)
                    outputs = rows.view(*outputs.shape[:-1], layer.out_features)
                case nn.LayerNorm():
                    outputs = layer_norm(outputs, layer.normalized_shape, eps=layer.eps)
                    if layer.elementwise_affine:
                        middle = (1,) * (outputs.dim() - 1 - len(layer.normalized_shape))
                        outputs = outputs * _spread(own(layer, prefix, "weight"), middle)
                        if layer.bias is not None:
                            outputs = outputs + _spread(own(layer, prefix, "bias"), middle)
                case _:
                    outputs = layer(outputs)
        return outputs

    return forward


def _spread(rows: Tensor, middle: tuple[int, ...]) -> Tensor:
    return rows.view(len(rows), *middle, *rows.shape[1:])


def _chain(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers in the order in which a chain runs them, with what their parameters' names begin with."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _chain(child, f"{prefix}{name}.")
    else:
        yield prefix, module


def _reused(module: nn.Module) -> bool:
    """Whether a layer or a parameter occurs twice."""
    parameters = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    layers = [id(part) for _, part in module.named_modules(remove_duplicate=False)]
    return len(set(parameters)) < len(parameters) or len(set(layers)) < len(layers)
