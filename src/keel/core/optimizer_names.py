"""The optimisers that a spec can name, with the settings of each. A spec is checked against them before PyTorch is
imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keel.errors import KeelError, unknown_name

OptimizerState = Literal["reset", "keep"]
"""What becomes of a client's optimiser state after a round: it is dropped, or kept as client state."""


@dataclass(frozen=True)
class NamedOptimizer:
    """A class of torch.optim."""

    cls: str
    settings: tuple[str, ...]


OPTIMIZERS = {
    "sgd": NamedOptimizer("SGD", ("momentum", "dampening", "nesterov")),
    "adam": NamedOptimizer("Adam", ("betas", "eps", "amsgrad", "fused")),
    "adamw": NamedOptimizer("AdamW", ("betas", "eps", "amsgrad", "fused")),
    "adagrad": NamedOptimizer("Adagrad", ("eps", "lr_decay", "initial_accumulator_value", "fused")),
    "rmsprop": NamedOptimizer("RMSprop", ("alpha", "eps", "momentum", "centered")),
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
        if not isinstance(value, int | float | list | tuple):
            raise KeelError(f"local.{setting} must be a number, a list of numbers or true or false (got {value!r})")
