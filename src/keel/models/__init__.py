"""The models by name. A model is a function of the shape of an input, the number of classes and its own settings."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call
from torch import nn

from keel.errors import KeelError, explain, unknown
from keel.models.small import linear, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp}

_CONFIG = ConfigDict(strict=True)


def build(name: str, input_shape: tuple[int, ...], classes: int, settings: dict[str, Any]) -> nn.Module:
    if name not in MODELS:
        raise KeelError(f"model.name: {name!r} stands for a model passed in Python: keel.run(..., model=...)")
    try:
        return validate_call(config=_CONFIG)(MODELS[name])(input_shape, classes, **settings)
    except ValidationError as error:
        raise KeelError(explain(error, "model")) from None
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise KeelError(f"model: cannot be built ({str(error).splitlines()[0]})") from error


def check_settings(name: str, settings: dict[str, Any]) -> None:
    """Whether the model has these settings; that their values suit is found when it is built."""
    accepted = list(signature(MODELS[name]).parameters)[2:]
    for setting in settings:
        if setting not in accepted:
            raise unknown(f"model ({name})", setting, accepted or ["name alone: it has no settings"])
