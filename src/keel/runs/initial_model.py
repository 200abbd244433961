"""The module that training starts from: built by name or passed in Python, with the weights of `model.init`."""

from copy import deepcopy

from torch import nn

from keel import models
from keel.config.schema import ModelSpec
from keel.core.torch_randomness import keyed_torch_rng
from keel.models.normalisation import group_norm
from keel.models.weights import load_initial


def initial_module(
    model: ModelSpec, seed: int, input_shape: tuple[int, ...], classes: int, passed: nn.Module | None = None
) -> nn.Module:
    """Build the module that the spec describes. A module that is passed replaces it, and does not change."""
    module = build_module(model, seed, input_shape, classes) if passed is None else passed
    if model.buffers == "group_norm":
        module = group_norm(module)
    if model.init is not None:
        module = deepcopy(module)
        load_initial(module, model.init)
    return module


def build_module(model: ModelSpec, seed: int, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the model that the spec names, with weights that are a function of the seed."""
    with keyed_torch_rng(seed, "model"):
        return models.build(model.name, input_shape, classes, model.settings)
