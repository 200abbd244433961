"""The held-out examples of single clients."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from keel.core.examples import Examples, Partition

CLIENTS_PER_PART = 8
"""How many clients one part of the work has."""


@dataclass(frozen=True)
class ClientTests:
    """The held-out examples of some clients."""

    examples: Examples
    clients: np.ndarray
    partition: Partition
    """The rows of `examples` that each of `clients` has, in their order."""
    steps: int = 0
    """How many local steps of plain SGD come before a client is evaluated."""
    lr: float = 0.0

    @property
    def parts(self) -> int:
        return ceil(len(self.clients) / CLIENTS_PER_PART)

    def of_part(self, part: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the clients of a part, each with the rows of its examples."""
        for position in range(part * CLIENTS_PER_PART, min((part + 1) * CLIENTS_PER_PART, len(self.clients))):
            yield int(self.clients[position]), self.partition[position]
