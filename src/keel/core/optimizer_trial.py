"""Tries an optimiser of torch.optim on a few weights: what it accepts, and whether it is elementwise."""

from collections.abc import Callable, Sequence
from inspect import Parameter, signature

import torch
from torch import Tensor

from keel.core.torch_randomness import keyed_torch_rng

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Makes an optimiser of parameters, as the classes of torch.optim do; `lr` and `weight_decay` are passed by name."""


def accepts(make: MakeOptimizer, name: str) -> bool:
    """Return whether the optimiser has this keyword parameter."""
    try:
        parameters = signature(make).parameters
    except ValueError:  # a class in C has no signature
        return True
    return name in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())


def is_elementwise(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> bool:
    """Return whether an optimiser gives the same steps on one vector, on its parts, on a part alone, and on rows."""
    try:
        whole = weights_after_steps(make, lambda vector: [vector])
        alone = weights_after_steps(make, lambda vector: [vector[:5]])
        parts = weights_after_steps(make, lambda vector: torch.split(vector, [5, 7]))
        rows = weights_after_steps(make, lambda vector: [vector.view(2, 6)])
    except Exception:  # it needs tensors of another kind, such as matrices; `check` tries it on the model's own
        return False
    pairs = [(whole, parts), (whole, rows), (whole[:5], alone[:5])]
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs)


def weights_after_steps(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    split: Callable[[Tensor], Sequence[Tensor]],
    lr: float = 0.01,
) -> Tensor:
    """Return twelve weights after three steps, in which gradients differ by orders of magnitude."""
    weights = torch.linspace(-1, 1, 12)
    parts = [*split(weights)]
    with keyed_torch_rng(0, "optimizer"):
        optimizer = make(parts)
        for number in range(3):
            gradients = torch.cos(torch.arange(12.0) + number) * torch.logspace(-2, 1, 12)
            for part, gradient in zip(parts, split(gradients), strict=True):
                part.grad = gradient
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    return weights
