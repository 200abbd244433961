"""A model of the clients' network and devices, from which the wall-clock time of a real federation is estimated."""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from keel.core.randomness import keyed_rng


class Network(BaseModel):
    """The clients' bandwidth, latency and speed. A round lasts until its slowest client has answered."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    up_mbps: float = Field(10.0, gt=0)
    """A client's upload bandwidth in megabits per second."""
    down_mbps: float = Field(50.0, gt=0)
    """A client's download bandwidth in megabits per second."""
    latency_ms: float = Field(50.0, ge=0)
    """The one-way latency; a round has two transfers, down and up."""
    slowdown: float = Field(1.0, gt=0)
    """A client's computing time relative to a core of the machine that ran the simulation."""
    straggle: float = Field(0.0, ge=0, le=10)
    """The spread of the devices: a client's computing time is multiplied by exp(straggle z), z standard normal."""

    def round_seconds(
        self, seed: int, round: int, cohort: list[int], down: float, up: float, computing: float
    ) -> float:
        """The duration of a round: a client receives `down` bytes, sends `up` and computes for `computing` seconds."""
        slowest = 1.0
        if self.straggle:
            spread = [keyed_rng(seed, "network", round, client).standard_normal() for client in cohort]
            slowest = float(np.exp(self.straggle * max(spread)))
        transfer = 8e-6 * (down / self.down_mbps + up / self.up_mbps)
        return 2e-3 * self.latency_ms + transfer + computing * self.slowdown * slowest
