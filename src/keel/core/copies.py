"""Copies of modules that share what training does not change."""

from copy import deepcopy

from torch import nn


def sharing_frozen(module: nn.Module) -> nn.Module:
    """A copy that shares the frozen parameters with the module: with adapters, they are almost the whole model."""
    return deepcopy(
        module, {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    )
