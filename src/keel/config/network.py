"""A model of the clients' network and devices, from which the wall-clock time of a real federation is estimated."""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from keel.core.randomness import keyed_rng

STRAGGLER_SLOWDOWN = 10.0


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
    stragglers: float | None = Field(None, ge=0, le=1)
    """The share of the clients whose devices are slow in every round."""
    straggler_slowdown: float | None = Field(None, ge=1)
    """The factor of the computing time of these devices; 10 by default."""

    @model_validator(mode="after")
    def _slow_devices(self) -> "Network":
        if self.straggler_slowdown is not None and self.stragglers is None:
            raise ValueError("straggler_slowdown requires stragglers, the share of the clients with slow devices")
        return self

    def round_seconds(
        self, seed: int, round: int, cohort: list[int], down: float, up: float, computing: float
    ) -> float:
        """The duration of a round: a client receives `down` bytes, sends `up` and computes for `computing` seconds."""
        varied = self.straggle or self.stragglers
        slowest = max(self._factor(seed, round, client) for client in cohort) if varied else 1.0
        return self._seconds(down, up, computing * slowest)

    def client_seconds(self, seed: int, round: int, client: int, down: float, up: float, computing: float) -> float:
        """The time of one client from the broadcast to its answer."""
        return self._seconds(down, up, computing * self._factor(seed, round, client))

    def _seconds(self, down: float, up: float, computing: float) -> float:
        transfer = 8e-6 * (down / self.down_mbps + up / self.up_mbps)
        return 2e-3 * self.latency_ms + transfer + computing * self.slowdown

    def _factor(self, seed: int, round: int, client: int) -> float:
        """The client's computing time in this round, relative to a device of median speed."""
        factor = 1.0
        if self.straggle:
            factor = float(np.exp(self.straggle * keyed_rng(seed, "network", round, client).standard_normal()))
        if self.stragglers and keyed_rng(seed, "straggler", client).random() < self.stragglers:
            factor *= self.straggler_slowdown or STRAGGLER_SLOWDOWN
        return factor
