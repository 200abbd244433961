"""The models by name. A model is a function of the shape of an input, the number of classes and its own settings."""

from collections.abc import Callable
from typing import Any

from torch import nn

from keel.errors import KeelError
from keel.models.lenet import lenet
from keel.models.recurrent import char_lstm, word_lstm
from keel.models.resnet import resnet20
from keel.models.small import linear, mlp
from keel.models.vision import mobilenet_v2, vit_b16
from keel.settings import call

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


def build(name: str, input_shape: tuple[int, ...], classes: int, settings: dict[str, Any]) -> nn.Module:
    if name not in MODELS:
        raise KeelError(f"model.name: {name!r} stands for a model passed in Python: keel.run(..., model=...)")
    try:
        return call("model", MODELS[name], input_shape, classes, **settings)
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise KeelError(f"model: cannot be built ({str(error).splitlines()[0]})") from error
