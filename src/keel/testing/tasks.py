"""Small federated tasks to test algorithms on."""

from typing import Any

import numpy as np
import torch
from torch import nn

from keel.config.defaults import make_spec
from keel.config.overrides import merge
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.loop import Loop
from keel.core.records import Record
from keel.runs.build import build, make_task


def uneven_data(seed: int = 0, sizes: tuple[int, ...] = (3, 11, 7, 4, 16, 9), inputs: int = 5) -> FederatedData:
    """Clients with unequal numbers of examples and unequal label distributions over three classes."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    labels = (client + rng.integers(0, 2, total)) % 3
    features = rng.normal(size=(total, inputs)) + labels[:, None] + 0.3 * client[:, None]
    examples = Examples(torch.from_numpy(features).float(), torch.from_numpy(labels))
    parts = [np.flatnonzero(client == c) for c in range(len(sizes))]
    return FederatedData("uneven", examples, examples, Partition.of(parts), 3)


def small_network(seed: int = 0, inputs: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 3))


def uneven_loop(table: dict[str, Any]) -> Loop:
    """A loop over uneven clients with unequal local steps, weight decay and partial participation.

    Args:
        table: Fields of the spec that differ from those of this task.
    """
    base: dict[str, Any] = {
        "rounds": 25,
        "local": {"epochs": 2, "batch": 4, "lr": 0.1, "weight_decay": 0.01},
        "participation": {"rate": 0.5},
        "evaluation": {"every": 5, "last": 1},
        "engine": {"name": "serial"},
        "data": {"name": "custom"},
        "model": {"name": "custom"},
    }
    if "steps" in table.get("local", {}):
        del base["local"]["epochs"]
    spec = make_spec(merge(base, table))
    return build(spec, make_task(spec, module=small_network(), data=uneven_data())).loop


def records_of(loop: Loop) -> list[Record]:
    """The records of a run from the initial state."""
    records: list[Record] = []
    loop.run(loop.start(), [lambda record, *_: records.append(record)])
    return records
