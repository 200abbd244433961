"""Makes the local optimiser of a run: by a name, as "module:name", or from a class or function that was passed."""

from math import prod

import torch
from torch import nn

from keel import registry
from keel.config.schema import LocalSpec
from keel.core.optimizer_names import OPTIMIZERS
from keel.core.optimizer_trial import MakeOptimizer
from keel.core.optimizers import LocalOptimizer, PlainSGD, TorchOptimizer
from keel.errors import KeelError


def make_optimizer(local: LocalSpec, module: nn.Module, passed: MakeOptimizer | None = None) -> LocalOptimizer:
    """Return the optimiser of local steps.

    Args:
        passed: A class or a function that was passed in Python, instead of the one that the spec names.

    Raises:
        KeelError: It cannot be found, or fails on the model's parameters.
    """
    if isinstance(passed, torch.optim.Optimizer):
        name = type(passed).__name__
        raise KeelError(f"optimizer must be a class or a function, not an instance: pass optimizer={name}")
    if passed is not None and not callable(passed):
        raise KeelError(f"optimizer must be a class like torch.optim.AdamW, or a function (got {passed!r})")
    shapes = [parameter.shape for parameter in module.parameters() if parameter.requires_grad]
    decays = [local.decay_biases or len(shape) > 1 for shape in shapes]
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in local.settings.items()}
    if passed is None and local.is_plain_sgd:
        mask = [torch.full((prod(shape),), float(on)) for shape, on in zip(shapes, decays, strict=True)]
        return PlainSGD(local.weight_decay, None if all(decays) else torch.cat(mask))
    make = passed or _find(local.optimizer)
    optimizer = TorchOptimizer(make, shapes, decays, local.weight_decay, settings, local.optimizer_state == "keep")
    optimizer.check()
    return optimizer


def _find(name: str) -> MakeOptimizer:
    if name in OPTIMIZERS:
        return getattr(torch.optim, OPTIMIZERS[name].cls)
    found: MakeOptimizer = registry.imported("local.optimizer", name)
    if not callable(found):
        raise KeelError(f"local.optimizer: {name!r} must be a class of torch.optim or like one (got {found!r})")
    return found
