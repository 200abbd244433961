"""The Python objects that a call passes to each of its runs: models, data, losses, samplers, engines, hooks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from keel.core.examples import FederatedData
from keel.core.observers import Hook, Observer, as_observer
from keel.core.sampling import Sampler
from keel.core.torch_randomness import keyed_torch_rng
from keel.errors import KeelError
from keel.runs.build import EngineFactory
from keel.runs.passed import objects_only

ModelSource = nn.Module | Callable[[int], nn.Module]
"""A module, or a function of the seed that returns one."""
DataSource = FederatedData | Callable[[int], FederatedData]
"""Federated data, or a function of the seed that returns them."""
SamplerSource = Sampler | Callable[[int], Sampler]
"""A sampler, or a function of the seed that returns one."""
SOURCES = {"model": "a torch.nn.Module", "data": "a keel.FederatedData, as from keel.federate", "sampler": "a sampler"}
"""The arguments that may be functions of the seed, and what they return."""

__all__ = ["DataSource", "EngineFactory", "ModelSource", "RunObjects", "SamplerSource"]


@dataclass(frozen=True)
class RunObjects:
    """What a call in Python passes to each of its runs."""

    passed: Mapping[str, Any]
    """The arguments of keel.run that are objects, or functions of the seed; None for those that are not passed."""
    hooks: Sequence[Observer | Hook] = ()

    def __post_init__(self) -> None:
        for hook in self.hooks:
            as_observer(hook)
        for name, expected in SOURCES.items():
            value = self.passed.get(name)
            if isinstance(value, type):
                example = f"lambda seed: {value.__name__}(...)"
                raise KeelError(
                    f"{name} must be {expected}, or a function of the seed that returns one, as in {example} "
                    f"(got the class {value.__name__})"
                )
            if value is not None and not _is_instance(name, value) and not callable(value):
                raise KeelError(
                    f"{name} must be {expected}, or a function of the seed that returns one (got {value!r})"
                )

    @property
    def used(self) -> bool:
        """Whether the result of a run depends on an object."""
        return any(objects_only(value) is not None for value in self.passed.values())

    def for_seed(self, seed: int) -> dict[str, Any]:
        """The arguments of keel.run for a run with this seed."""
        made = {name: objects_only(self.made(name, seed)) for name in self.passed}  # names are in the spec
        return {name: value for name, value in made.items() if value is not None}

    def of_task(self, seed: int) -> dict[str, Any]:
        """The arguments of keel.runs.build.make_task for a run with this seed."""
        made = self.for_seed(seed)
        names = {"module": "model", "data": "data", "loss": "loss", "metrics": "metrics"}
        return {argument: made[name] for argument, name in names.items() if name in made}

    def made(self, name: str, seed: int) -> Any:
        """The object for this seed. PyTorch's generator is seeded, so that initial weights depend on the seed alone."""
        value = self.passed.get(name)
        if value is None or name not in SOURCES or _is_instance(name, value):
            return value
        with keyed_torch_rng(seed, name):
            try:
                result = value(seed)
            except TypeError as error:
                raise KeelError(
                    f"{name}: the function of the seed fails ({error}); it is called with the seed"
                ) from error
        if not _is_instance(name, result):
            raise KeelError(f"{name}: the function of the seed must return {SOURCES[name]} (got {result!r})")
        return result


def _is_instance(name: str, value: Any) -> bool:
    match name:
        case "model":
            return isinstance(value, nn.Module)
        case "data":
            return isinstance(value, FederatedData)
        case _:
            return hasattr(value, "cohort")
