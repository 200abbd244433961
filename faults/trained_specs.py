"""Random specs that are trained for a round or two. A run ends with a status, or is refused before it writes."""

import warnings
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import keel
from faults._data_folder import data_folder
from faults._hostile import assignments, put
from faults._limits import Exceeded, limited
from faults.specs import fault_of
from keel import KeelError
from keel.algorithms import REGISTRY

ENDS = ("finished", "diverged", "stopped")
EXTREME = [1.2e-38, 1e-30, 1e-8, 1e-3, 1.0, 10.0, 1e4, 1e10, 1e20, 1e30, 3.4e38]
"""Magnitudes that a number of a spec may have."""
MAGNITUDES = [
    "local.lr",
    "local.weight_decay",
    "local.clip",
    "local.momentum",
    "server.lr",
    "server.clip",
    "data.alpha",
]


def random_table(rng: Random) -> dict[str, Any]:
    """A small run with extreme magnitudes, and sometimes other fields."""
    algorithm = rng.choice(list(REGISTRY.values()))
    table: dict[str, Any] = {}
    for field, value in assignments(rng, python=False) if rng.random() < 0.3 else []:
        put(table, field, value)
    settings = [f"algorithm.{field.name}" for field in fields(algorithm) if field.type != "str"]
    numbers = [*MAGNITUDES, *settings]
    for field in rng.sample(numbers, rng.choice([1, 2, 3])):
        put(table, field, rng.choice(EXTREME))
    put(table, "algorithm.name", algorithm.name)
    put(table, "rounds", rng.choice([1, 2, 3]))
    put(table, "data.clients", rng.choice([10, 15]))
    put(table, "local.steps", rng.choice([1, 2, 3]))
    put(table, "engine.name", rng.choice(["serial", "cohort"]))
    return table


def check(seed: int, folder: Path) -> str | None:
    rng, out = Random(seed), folder / "run"
    table = random_table(rng)
    try:
        with data_folder(folder), warnings.catch_warnings(), limited(60, gigabytes=6):
            warnings.simplefilter("ignore")
            status = keel.run(table, out=out).summary["status"]
    except KeelError as error:
        return fault_of(str(error)) or ("a refused run has written files" if out.exists() else None)
    except Exceeded as exceeded:
        return str(exceeded)
    return None if status in ENDS else f"the run ended with the status {status!r}"
