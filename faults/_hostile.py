"""Random specs: valid fields with values that are valid, of the wrong type, too large, or not values at all."""

from dataclasses import fields
from datetime import date, datetime
from functools import cache
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any

from keel import models
from keel.algorithms import REGISTRY
from keel.config.schema import Spec
from keel.core.optimizer_names import OPTIMIZERS
from keel.data import catalog

NAMES: dict[str, list[str]] = {
    "algorithm.name": [*REGISTRY, "keel.algorithms.fedavg:FedAvg"],
    "data.name": [*catalog.CATALOG, *["digits"] * 10],
    "data.partition": ["dirichlet", "dirichlet_per_class", "classes", "shards", "quantity", "feature", "iid", "key"],
    "model.name": [*models.MODELS, "torch.nn:Linear", *["mlp"] * 5],
    "model.buffers": ["average", "local", "freeze", "group_norm"],
    "local.optimizer": [*OPTIMIZERS, "torch.optim:NAdam"],
    "local.optimizer_state": ["reset", "keep"],
    "local.schedule": ["constant", "cosine", "linear", "exponential"],
    "local.precision": ["float32", "bf16"],
    "local.loss": ["cross_entropy", "mse", "huber", "bce", "model", "torch.nn:MSELoss"],
    "server.schedule": ["constant", "cosine", "linear", "exponential"],
    "server.weighting": ["examples", "uniform"],
    "server.clip": ["adaptive"],
    "participation.sampler": ["uniform", "cyclic", "weighted"],
    "evaluation.on": ["test", "validation"],
    "evaluation.metrics": ["accuracy", "f1", "auroc", "mae"],
    "engine.name": ["auto", "serial", "serial", "cohort", "cohort", "pool", "flower"],
    "engine.device": ["auto", "cpu", "cuda", "mps"],
    "engine.layout": ["contiguous", "channels_last"],
    "memory.precision": ["float32", "float16"],
    "tracking.wandb_mode": ["online", "offline"],
}
NUMBERS: list[Any] = [0, 1, 2, 3, 5, 10, 64, 0.01, 0.1, 0.5, 0.9, 1.0, True, False, [1], [8, 8], [0.9, 0.99]]
LARGE = [10**3, 10**6, 10**9, 2**31, 2**63 - 1, 2**63, 2**64, 10**20, 10**308, 10**400]
FLOATS = [-0.0, 5e-324, 1e-300, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "0",
    "1e3",
    "0x10",
    "nan",
    "true",
    "None",
    "/",
    "..",
    "/dev/null",
    "/etc",
    "~",
    "a/b",
    "C:\\x",
    "%s",
    "{}",
    "${HOME}",
    "[x]",
    "-q",
    "--json",
    "=",
    "a=b",
]
REFERENCES = [
    ":",
    "a:",
    ":a",
    "a:b:c",
    ".:x",
    "..a:x",
    "os:",
    "os:path",
    "os:getcwd",
    "sys:path",
    "math:pi",
    "builtins:dict",
    "builtins:int",
    "json:loads",
]
REFERENCES += ["torch:nn", "torch.nn:Module", "no.such:thing", "keel:run"]
CONTROL = ["", " ", "\0", "\n", "\x1b[2J", "\u202e", "é" * 50, "a" * 10_000]
TABLES: list[Any] = [{}, {"name": {}}, {"a": {"b": {"c": 1}}}, {"": 1}, {"name": "digits"}]
LISTS: list[Any] = [[], [[]], [{}], [1, "a"], [0] * 1000, [10**6] * 3, [10**9], [-1], [0], [True], [[1], [2]]]
LISTS += [[float("nan")], ["accuracy"], ["tensorboard"]]
HOSTILE: list[Any] = [-1, *LARGE, *(-number for number in LARGE), *FLOATS, *TEXTS, *REFERENCES, *CONTROL]
HOSTILE += [*TABLES, *LISTS, date(2026, 1, 1), datetime(2026, 1, 1, 12)]
OBJECTS: list[Any] = [None, b"digits", 1j, (), (1, 2), {1}, frozenset(), object(), int, len, Path("x"), {1: 2}, [None]]
OBJECTS += [{None: 1}, {"a": object()}, range(3), Ellipsis, bytearray(b"x"), ValueError("x"), 10**5000, "\ud800"]
"""Values that TOML does not have."""


@cache
def known_fields() -> list[str]:
    """Every field that some spec can have."""
    found = []
    for section, field in Spec.model_fields.items():
        of_table = getattr(field.annotation, "model_fields", None)
        found += [section] if of_table is None else [f"{section}.{name}" for name in of_table]
    found += [f"stop.{name}" for name in ("target", "patience", "min_delta", "seconds", "gigabytes")]
    found += [f"network.{name}" for name in ("up_mbps", "down_mbps", "latency_ms", "slowdown", "straggle")]
    found += [f"algorithm.{name}" for cls in REGISTRY.values() for name in ("name", *(f.name for f in fields(cls)))]
    found += [f"model.{name}" for model in models.MODELS.values() for name in list(signature(model).parameters)[2:]]
    found += [f"data.{name}" for entry in catalog.CATALOG.values() for name in signature(entry.load).parameters]
    found += [f"local.{name}" for optimizer in OPTIMIZERS.values() for name in optimizer.settings]
    return sorted({*found, *NAMES})


def nested(rng: Random, deepest: int) -> Any:
    """A list or a table within lists or tables."""
    value: Any = rng.choice(HOSTILE)
    for _ in range(rng.choice([1, 3, 20, deepest])):
        value = [value] if rng.random() < 0.5 else {"name": value}
    return value


def misspelt(rng: Random, name: str) -> str:
    """The name with a letter that is left out, added or replaced."""
    at = rng.randrange(len(name) + 1)
    letter = rng.choice(["", "x", ".", "\0", "é", " ", name[at : at + 1].upper()])
    return name[:at] + letter + name[at + rng.randrange(2) :]


def value_for(field: str, rng: Random, python: bool) -> Any:
    """A value of this field, valid as often as not."""
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(NAMES.get(field, NUMBERS))
    if kind < 0.6:
        return nested(rng, deepest=5000 if python else 50)
    if kind < 0.65:
        return misspelt(rng, rng.choice(NAMES.get(field, ["abc"])))
    if kind < 0.7:
        return str(rng.choice(NUMBERS))
    if kind < 0.75 and python:
        return rng.choice(OBJECTS)
    if kind < 0.85:
        return rng.choice(rng.choice(list(NAMES.values())))
    return rng.choice(HOSTILE)


def assignments(rng: Random, python: bool = True) -> list[tuple[str, Any]]:
    """Some fields with their values, in the order in which they are set."""
    chosen = [rng.choice(known_fields()) for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 5, 8]))]
    if rng.random() < 0.1:
        chosen.append(misspelt(rng, rng.choice(known_fields())))
    if rng.random() < 0.05:
        chosen.append(rng.choice(known_fields()).partition(".")[0])
    return [(field, value_for(field, rng, python)) for field in chosen]


def put(table: dict[Any, Any], field: str, value: Any) -> None:
    """Set a field as Python code would, whatever is there already."""
    *sections, name = field.split(".")
    for section in sections:
        below = table.get(section)
        table[section] = below if isinstance(below, dict) else {}
        table = table[section]
    table[name] = value
