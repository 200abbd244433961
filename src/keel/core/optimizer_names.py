"""The optimisers that a spec can name, with the settings of each. A spec is checked against them before PyTorch is
imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from keel.errors import KeelError, shown, unknown_name

OptimizerState = Literal["reset", "keep"]
"""What becomes of a client's optimiser state after a round: it is dropped, or kept as client state."""


@dataclass(frozen=True)
class NamedOptimizer:
    """A class of torch.optim."""

    cls: str
    settings: tuple[str, ...]
    lr: float
    """The default learning rate of a spec that chooses this optimiser instead of the default one."""


FLAGS = ("nesterov", "amsgrad", "centered")
"""Settings that are true or false. `betas` are two numbers, and all others are numbers from 0."""
OPTIMIZERS = {
    "sgd": NamedOptimizer("SGD", ("momentum", "dampening", "nesterov"), 0.1),
    "adam": NamedOptimizer("Adam", ("betas", "eps", "amsgrad"), 0.001),
    "adamw": NamedOptimizer("AdamW", ("betas", "eps", "amsgrad"), 0.001),
    "adagrad": NamedOptimizer("Adagrad", ("eps", "lr_decay", "initial_accumulator_value"), 0.01),
    "rmsprop": NamedOptimizer("RMSprop", ("alpha", "eps", "momentum", "centered"), 0.001),
}


def check_optimizer(name: str, settings: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise a KeelError unless this is a known optimiser with settings that it has.

    The settings of a class given as "module:name" are checked when it is imported.

    Args:
        fields: The other fields of the table, which an error about an unknown setting lists.
    """
    if name not in OPTIMIZERS:
        if ":" not in name:
            raise unknown_name("local.optimizer", name, OPTIMIZERS, "or module:name")
        return
    for setting, value in settings.items():
        accepted = OPTIMIZERS[name].settings
        if setting not in accepted:
            others = [other for other, optimizer in OPTIMIZERS.items() if setting in optimizer.settings]
            if others:
                raise KeelError(
                    f"local.{setting} requires local.optimizer = {' or '.join(map(repr, others))} (got {name!r})"
                )
            raise unknown_name("local field", setting, [*accepted, *fields])
        _check_value(setting, value)
    if settings.get("nesterov") and not settings.get("momentum"):
        raise KeelError("local.nesterov = true requires local.momentum above 0, as in local.momentum = 0.9")


def _check_value(setting: str, value: Any) -> None:
    if setting in FLAGS:
        valid, expected = isinstance(value, bool), "true or false"
    elif setting == "betas":
        valid = isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(part, 1.0) for part in value)
        expected = "two numbers from 0 and below 1, as in [0.9, 0.99]"
    else:
        valid, expected = _is_number(value), "a number from 0"
    if not valid:
        raise KeelError(f"local.{setting} must be {expected} (got {shown(value)})")


def _is_number(value: Any, limit: float = inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < limit
