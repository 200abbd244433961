"""The registry: every algorithm in this folder by name, and a user's own by "module:Class"."""

import pathlib
import sys
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from keel.algorithms.base import Algorithm, ClientContext, Context, Message, Path, Report
from keel.errors import KeelError, explain, unknown


def _own_algorithms() -> dict[str, type[Algorithm]]:
    modules = [import_module(f"{__name__}.{entry.name}") for entry in iter_modules(__path__)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    named = {c for c in classes if issubclass(c, Algorithm) and "name" in vars(c)}
    return {c.name: c for c in sorted(named, key=lambda c: c.name)}


REGISTRY = _own_algorithms()


def algorithm_class(name: str) -> type[Algorithm]:
    """A registered class, or the one that "module:Class" names (the working folder is searched too)."""
    if name in REGISTRY:
        return REGISTRY[name]
    if ":" in name:
        return _imported(name)
    raise unknown("algorithm.name", name, [*REGISTRY, "module:Class"])


def make_algorithm(name: str, **settings: Any) -> Algorithm:
    """The algorithm with these hyper-parameters; a wrong one is a KeelError that names it."""
    cls = algorithm_class(name)
    accepted = [field.name for field in fields(cls)]
    for setting in settings:
        if setting not in accepted:
            raise unknown(f"algorithm ({name})", setting, accepted or ["name alone: it has no hyper-parameters"])
    try:
        return cls(**settings)
    except ValidationError as error:
        raise KeelError(explain(error, "algorithm")) from None


def messages_of(algorithm: Algorithm, theta: Tensor) -> tuple[list[Message], list[Message]]:
    """The messages of a round for one client, down and up, each as it is with a model like `theta`."""
    ctx = ClientContext(round=1, clients=10, cohort=1, share=0.1, period=10.0, lr=0.1, server_lr=1.0, steps=1)
    server, memory = algorithm.init_server(theta), algorithm.init_client(theta)
    received = algorithm.broadcast(server, ctx)
    down, up = [received], []
    if algorithm.probes:
        up.append({"gradient": theta})
        _, more = algorithm.absorb(server, [Report(up[0], 1.0, 1)], ctx)
        down.append(more)
    path = Path(theta, theta, mean_gradient=theta, full_gradient=theta, velocity=theta)
    up.append(algorithm.report(path, {**received, **down[-1]}, memory, ctx)[0])
    return down, up


def describe(cls: type[Algorithm]) -> dict[str, Any]:
    """What `keel algorithms` says of one: its traffic is that of real messages, in units of the model."""
    algorithm, size = cls(), 1000
    down, up = messages_of(algorithm, torch.zeros(size))
    units = [sum(t.numel() for message in way for t in message.values()) / size for way in (down, up)]
    sent = dict(zip(("down", "up"), units, strict=True))
    if algorithm.pooled:
        sent = {"down": 0.0, "up": 0.0}
    return {
        "name": cls.name,
        "title": cls.title,
        "paper": cls.paper,
        "stateful": bool(algorithm.init_client(torch.zeros(size))),
        "mean_suffices": algorithm.mean_suffices,
        **sent,
        "relative_cost": (sent["down"] + sent["up"]) / 2,
    }


def _imported(name: str) -> type[Algorithm]:
    module_name, _, class_name = name.partition(":")
    folder = str(pathlib.Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        cls = getattr(import_module(module_name), class_name)
    except Exception as error:  # it is the user's module: whatever it raises is theirs to mend
        reason = f"{type(error).__name__}: {error}"
        raise KeelError(f"algorithm.name: {name!r} cannot be imported ({reason}); accepted: module:Class") from error
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise KeelError(f"algorithm.name: {name!r} is not a subclass of keel.Algorithm")
    for attribute in ("name", "title", "paper"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise KeelError(f"algorithm.name: {name!r} has no {attribute}; accepted: a text")
    return cls


__all__ = ["REGISTRY", "Algorithm", "Context", "Report", "algorithm_class", "describe", "make_algorithm", "messages_of"]
