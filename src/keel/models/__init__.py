"""The models by name, and the models that users bring as "module:name" or in an installed package.

A model of Keel is a function of the shape of an input, the number of classes and keyword-only settings.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from keel import registry
from keel.core.ram import available_ram
from keel.errors import KeelError, shown
from keel.settings import call, call_imported, takes_shape_and_classes
from keel.units import size

if TYPE_CHECKING:
    from torch import nn

ENTRY_POINTS = "keel.models"
COPIES = 5
"""The memory in which a model can be checked and trained, in models: its own, copies for the check, a gradient."""
MODELS: Mapping[str, Callable[..., "nn.Module"]] = registry.Lazy(
    {
        "linear": "keel.models.small:linear",
        "mlp": "keel.models.small:mlp",
        "cnn": "keel.models.small:cnn",
        "lenet": "keel.models.lenet:lenet",
        "resnet20": "keel.models.resnet:resnet20",
        "char_lstm": "keel.models.recurrent:char_lstm",
        "word_lstm": "keel.models.recurrent:word_lstm",
        "mobilenet_v2": "keel.models.vision:mobilenet_v2",
        "vit_b16": "keel.models.vision:vit_b16",
    }
)


def find(name: str) -> Callable[..., "nn.Module"]:
    """Return the function or class that makes the model of this name.

    Args:
        name: A model of Keel, an entry point of the group "keel.models", or "module:name" of a subclass of nn.Module
            or of a function that returns a module.

    Raises:
        KeelError: There is no such model, it cannot be imported, or it is neither a class nor a function.
    """
    from torch import nn

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


def build(name: str, input_shape: tuple[int, ...], classes: int, settings: dict[str, Any]) -> "nn.Module":
    """Make a model from its name and settings.

    A user's model is called with the shape and the number of classes if its first two parameters are `input_shape` and
    `classes`, otherwise with its settings only.
    """
    from torch import nn

    if not registry.known(name, MODELS, ENTRY_POINTS):
        raise KeelError(f"model.name = {name!r} requires a model passed in Python: keel.run(..., model=...)")
    factory = find(name)
    if name not in MODELS:
        arguments = (input_shape, classes) if takes_shape_and_classes(factory) else ()
        module = call_imported("model.name", name, factory, *arguments, **settings)
        if not isinstance(module, nn.Module):
            raise KeelError(f"model.name: {name!r} must return a torch.nn.Module (got {type(module).__name__})")
        return module
    _check_size(name, factory, input_shape, classes, settings)
    try:
        return call("model", factory, input_shape, classes, **settings)
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise KeelError(f"model.name: {name!r} cannot be built ({str(error).splitlines()[0]})") from error


def _check_size(
    name: str, factory: Callable[..., "nn.Module"], input_shape: tuple[int, ...], classes: int, settings: dict[str, Any]
) -> None:
    """Raise a KeelError if a model is too large for this machine, before its parameters are allocated."""
    import torch

    if settings.get("pretrained") or not any(isinstance(value, int | list) for value in settings.values()):
        return  # the weights are in a file, or no width is set
    try:
        with torch.device("meta"):  # tensors without memory
            module = call("model", factory, input_shape, classes, **settings)
    except (RuntimeError, TypeError) as error:  # more elements than an integer can count
        raise KeelError(f"model.name: {name!r} cannot be built ({str(error).splitlines()[0]})") from error
    needed, ram = 4 * sum(parameter.numel() for parameter in module.parameters()), available_ram()
    if ram is not None and COPIES * needed > ram:
        raise KeelError(
            f"model.name: {name!r} with {shown(settings)} has {size(needed)} of parameters, and its training takes at "
            f"least {COPIES} times as much, but the machine has only {size(ram)} of RAM; use a smaller model"
        )
