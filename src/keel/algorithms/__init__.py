"""The registry: every algorithm in this folder by name, and a user's own by "module:Class"."""

import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from pydantic import ValidationError

from keel.algorithms.base import Algorithm, ClientContext, Context, Report
from keel.algorithms.base import Path as LocalPath
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


def describe(cls: type[Algorithm]) -> dict[str, Any]:
    """What `keel algorithms` says of one: its traffic is that of real messages, in units of the model."""
    algorithm, size = cls(), 1000
    theta = torch.zeros(size)
    ctx = ClientContext(round=1, clients=10, cohort=1, period=10.0, lr=0.1, server_lr=1.0, steps=1)
    received = algorithm.broadcast(algorithm.init_server(theta), ctx)
    memory = algorithm.init_client(theta)
    sent, _ = algorithm.report(LocalPath(start=theta, end=theta), received, memory, ctx)
    down, up = (sum(t.numel() for t in message.values()) / size for message in (received, sent))
    return {
        "name": cls.name,
        "title": cls.title,
        "paper": cls.paper,
        "stateful": bool(memory),
        "down": down,
        "up": up,
        "relative_cost": (down + up) / 2,
    }


def _imported(name: str) -> type[Algorithm]:
    module_name, _, class_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        cls = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise KeelError(f"algorithm.name: {name!r} cannot be imported ({error}); accepted: module:Class") from error
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise KeelError(f"algorithm.name: {name!r} is not a subclass of keel.Algorithm")
    return cls


__all__ = ["REGISTRY", "Algorithm", "Context", "Report", "algorithm_class", "describe", "make_algorithm"]
