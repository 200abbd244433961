"""The algorithms by name: those of this folder, those of installed packages, and "module:Class"."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from inspect import isfunction, signature
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from keel import registry
from keel.algorithms.base import Algorithm, ClientContext, Context, Message, Path, Report
from keel.algorithms.builtin import REGISTRY
from keel.errors import KeelError, explain, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_POINTS = "keel.algorithms"
DESCRIBED = (4096, 64, 640, 10)
"""The sizes of the parameter tensors of the model that `describe` counts messages for: the default on the digits."""


def algorithm_class(name: str) -> type[Algorithm]:
    """The class of that name: built in, registered by an installed package, or "module:Class"."""
    cls = registry.find("algorithm.name", name, REGISTRY, ENTRY_POINTS)
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise KeelError(f"algorithm.name: {name!r} must be a subclass of keel.Algorithm (got {cls!r})")
    for attribute in ("name", "title", "paper"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise KeelError(f"algorithm.name: {name!r} must have a class attribute {attribute!r} of type str")
    check_functions(cls)  # type: ignore[arg-type]  # a class is hashable
    return cls


@cache  # every spec is checked, and inspecting signatures would take half of the time of making one
def check_functions(cls: type[Algorithm]) -> None:
    """Raise a KeelError if a class lacks its decorator, or if a function has other parameters than Algorithm's."""
    fields_of = [kind for kind in vars(cls).get("__annotations__", {}).values() if "ClassVar" not in str(kind)]
    if fields_of and "__dataclass_fields__" not in vars(cls):
        raise KeelError(f"algorithm: decorate the class {cls.__name__} with @keel.hyperparameters")
    for name, function in vars(Algorithm).items():
        own = getattr(cls, name)
        if name.startswith("_") or not isfunction(function) or not isfunction(own):
            continue
        expected, got = signature(function).parameters, signature(own).parameters
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in got.values())
        if len(expected) != len(got) and not takes_any:
            raise KeelError(
                f"algorithm: {cls.__name__}.{name} must take ({', '.join(expected)}) (got ({', '.join(got)}))"
            )


def make_algorithm(name: str, **settings: Any) -> Algorithm:
    """The algorithm with these hyper-parameters; an invalid one is a KeelError that names it."""
    cls = algorithm_class(name)
    accepted = [field.name for field in fields(cls)]
    for setting in settings:
        if setting not in accepted:
            raise unknown_name("hyper-parameter", setting, accepted, owner=name)
    try:
        return cls(**settings)
    except ValidationError as error:
        raise KeelError(explain(error, "algorithm")) from None


def messages_of(
    algorithm: Algorithm, theta: "Tensor", sizes: Sequence[int] = ()
) -> tuple[list[Message], list[Message]]:
    """The messages of a round for one client, down and up, for a model like `theta`.

    Args:
        sizes: The number of elements of each of the model's tensors; by default it has one.
    """
    ctx = _client_context(sizes or (theta.numel(),))
    server, state = algorithm.init_server(theta), algorithm.init_client(theta)
    received = algorithm.broadcast(server, ctx)
    down, up = [received], []
    if algorithm.probes:
        up.append({"gradient": theta})
        _, more = algorithm.absorb(server, [Report(up[0], 1.0, 1)], ctx)
        down.append(more)
    received = {**received, **down[-1]}
    step_state = algorithm.init_steps(received, state, ctx)
    start = algorithm.start(received, state, ctx)
    path = Path(start, start, mean_gradient=theta, full_gradient=theta, step_state=step_state)
    up.append(algorithm.report(path, received, state, ctx)[0])
    return down, up


def step_vectors(algorithm: Algorithm, theta: "Tensor", sizes: Sequence[int]) -> int:
    """The number of model-sized tensors in an algorithm's step state."""
    ctx = _client_context(sizes)
    server, state = algorithm.init_server(theta), algorithm.init_client(theta)
    received = algorithm.broadcast(server, ctx)
    if algorithm.probes:
        received = {**received, **algorithm.absorb(server, [Report({"gradient": theta}, 1.0, 1)], ctx)[1]}
    step_state = algorithm.init_steps(received, state, ctx)
    return sum(value.numel() == theta.numel() for value in step_state.values())


def gradients_per_step(algorithm: Algorithm, sizes: Sequence[int]) -> int:
    """The number of gradients that an algorithm evaluates in a local step."""
    import torch

    theta, ctx, evaluated = torch.zeros(sum(sizes)), _client_context(sizes), []
    server, state = algorithm.init_server(theta), algorithm.init_client(theta)
    received = algorithm.broadcast(server, ctx)
    if algorithm.probes:
        received = {**received, **algorithm.absorb(server, [Report({"gradient": theta}, 1.0, 1)], ctx)[1]}

    def gradient(point: "Tensor") -> "Tensor":
        evaluated.append(point)
        return torch.ones_like(theta)

    known = {**state, **algorithm.init_steps(received, state, ctx)}
    algorithm.direction(algorithm.start(received, state, ctx), gradient, received, known, ctx)
    return len(evaluated)


def keeps_state(algorithm: Algorithm) -> bool:
    """Whether clients keep a state between their rounds."""
    import torch

    return bool(algorithm.init_client(torch.zeros(sum(DESCRIBED))))


def _client_context(sizes: Sequence[int]) -> ClientContext:
    """The context of the single step of one of ten clients."""
    numbers = {"share": 0.1, "period": 10.0, "lr": 0.1, "server_lr": 1.0}
    return ClientContext(round=1, clients=10, cohort=1, **numbers, steps=1, sizes=tuple(sizes))


def describe(cls: type[Algorithm]) -> dict[str, Any]:
    """The properties that `keel algorithms` lists. The traffic is that of real messages, in units of the model."""
    import torch

    algorithm, size = cls(), sum(DESCRIBED)
    down, up = messages_of(algorithm, torch.zeros(size), DESCRIBED)
    elements = [sum(t.numel() for message in direction for t in message.values()) for direction in (down, up)]
    units = [round(count / size, 2) for count in elements]  # a few numbers are nothing beside a model
    sent = dict(zip(("down", "up"), units, strict=True))
    if algorithm.pooled:
        sent = {"down": 0.0, "up": 0.0}
    return {
        "name": cls.name,
        "title": cls.title,
        "paper": cls.paper,
        "stateful": keeps_state(algorithm),
        "mean_suffices": algorithm.mean_suffices,
        **sent,
        "relative_cost": (sent["down"] + sent["up"]) / 2,
    }


__all__ = ["REGISTRY", "Algorithm", "Context", "Report", "algorithm_class", "describe", "make_algorithm", "messages_of"]
