"""How long a real federation would take: from bytes, computing time and a model of the clients' network and devices."""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from keel.randomness import draws


class Network(BaseModel):
    """What the clients have. A round lasts until the slowest of its cohort has answered."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    up_mbps: float = Field(10.0, gt=0)
    """Megabits per second from a client."""
    down_mbps: float = Field(50.0, gt=0)
    latency_ms: float = Field(50.0, ge=0)
    """Of each of a round's two exchanges."""
    slowdown: float = Field(1.0, gt=0)
    """How many times as long a client's device computes as a core of the machine that ran it."""
    straggle: float = Field(0.0, ge=0, le=10)
    """Spread of the devices: a client's computing time is multiplied by exp(straggle z), z standard normal."""

    def round_seconds(
        self, seed: int, round: int, cohort: list[int], down: float, up: float, computing: float
    ) -> float:
        """One round, in which each client gets `down` bytes, sends `up` and computes so many seconds."""
        slowest = 1.0
        if self.straggle:
            spread = [draws(seed, "network", round, client).standard_normal() for client in cohort]
            slowest = float(np.exp(self.straggle * max(spread)))
        transfer = 8e-6 * (down / self.down_mbps + up / self.up_mbps)
        return 2e-3 * self.latency_ms + transfer + computing * self.slowdown * slowest
