"""The models by name, and the models that users bring as "module:name" or in an installed package.

A model of Keel is a function of the shape of an input, the number of classes and keyword-only settings.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import nn

from keel import registry
from keel.errors import KeelError
from keel.models.lenet import lenet
from keel.models.recurrent import char_lstm, word_lstm
from keel.models.resnet import resnet20
from keel.models.small import linear, mlp
from keel.models.vision import mobilenet_v2, vit_b16
from keel.settings import call, call_imported, takes_shape_and_classes

ENTRY_POINTS = "keel.models"
MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "lenet": lenet,
    "resnet20": resnet20,
    "char_lstm": char_lstm,
    "word_lstm": word_lstm,
    "mobilenet_v2": mobilenet_v2,
    "vit_b16": vit_b16,
}


def find(name: str) -> Callable[..., nn.Module]:
    """Return the function or class that makes the model of this name.

    Args:
        name: A model of Keel, an entry point of the group "keel.models", or "module:name" of a subclass of nn.Module
            or of a function that returns a module.

    Raises:
        KeelError: There is no such model, it cannot be imported, or it is neither a class nor a function.
    """
    found = registry.find("model.name", name, MODELS, ENTRY_POINTS)
    if isinstance(found, nn.Module):
        raise KeelError(f"model.name: {name!r} must be a class or a function that makes a module (got a module)")
    if not callable(found):
        raise KeelError(
            f"model.name: {name!r} must be a subclass of torch.nn.Module or a function (got {type(found).__name__})"
        )
    try:
        signature(found)
    except (TypeError, ValueError) as error:
        raise KeelError(f"model.name: {name!r} must have a signature that Python can inspect ({error})") from error
    return found


def build(name: str, input_shape: tuple[int, ...], classes: int, settings: dict[str, Any]) -> nn.Module:
    """Make a model from its name and settings.

    A user's model is called with the shape and the number of classes if its first two parameters are `input_shape` and
    `classes`, otherwise with its settings only.
    """
    if not registry.known(name, MODELS, ENTRY_POINTS):
        raise KeelError(f"model.name = {name!r} requires a model passed in Python: keel.run(..., model=...)")
    factory = find(name)
    if name not in MODELS:
        arguments = (input_shape, classes) if takes_shape_and_classes(factory) else ()
        module = call_imported("model.name", name, factory, *arguments, **settings)
        if not isinstance(module, nn.Module):
            raise KeelError(f"model.name: {name!r} must return a torch.nn.Module (got {type(module).__name__})")
        return module
    try:
        return call("model", factory, input_shape, classes, **settings)
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise KeelError(f"model.name: {name!r} cannot be built ({str(error).splitlines()[0]})") from error
