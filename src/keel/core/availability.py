"""Simulated availability: which clients of a cohort are online, and which of these answer.

Every draw is a pure function of the seed, the round and the client, so that engines and resumed runs agree. Only the
clients of the cohort are drawn: the cost of a round does not grow with the number of idle clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from typing import Protocol

from keel.core.engine import Dropped
from keel.core.randomness import keyed_rng
from keel.core.records import OFFLINE

DROPPED_OUT = Dropped("dropped out")
MISSED = Dropped("missed the deadline")


@dataclass(frozen=True)
class Diurnal:
    """Clients that are online by day: with probability 1 at their best hour, and with `least` half a day later.

    The probability is a cosine over the day. A client's best hour is drawn once, from a part `spread` of the day: with
    0 all clients share it, with 1 there are as many clients online at any time.
    """

    rounds: float
    """The rounds of a day."""
    least: float = 0.0
    spread: float = 0.0

    def probability(self, seed: int, round: int, client: int) -> float:
        """The probability that the client is online in this round."""
        best = self.spread * keyed_rng(seed, "time zone", client).random()
        return self.least + (1 - self.least) * (1 + cos(2 * pi * (round / self.rounds - best))) / 2


class Devices(Protocol):
    """How long a client takes: its network and its device."""

    def client_seconds(self, seed: int, round: int, client: int, down: float, up: float, computing: float) -> float:
        """The seconds from the broadcast to the client's answer: it receives `down` bytes, sends `up` and computes."""


@dataclass(frozen=True)
class Attendance:
    """Who answers in a round."""

    offline: Mapping[int, Dropped] = field(default_factory=dict)
    """Clients of the cohort to which nothing is sent."""
    failed: Mapping[int, Dropped] = field(default_factory=dict)
    """Clients that receive the broadcast and do not answer."""
    seconds: float | None = None
    """The modelled duration of the round; None without a model of the devices."""


@dataclass(frozen=True)
class Availability:
    """Which clients are online, drop out or miss the deadline.

    Args:
        dropout: The probability that a client does not answer.
        deadline: The seconds that the server waits for answers.
        step_seconds: The computing time of a local step on a device of median speed.
        devices: How long clients take; required by `deadline`.
    """

    seed: int
    dropout: float = 0.0
    diurnal: Diurnal | None = None
    deadline: float | None = None
    step_seconds: float | None = None
    devices: Devices | None = None

    def attendance(self, round: int, cohort: Sequence[int], steps: Sequence[int], down: float, up: float) -> Attendance:
        """Who answers in a round.

        Args:
            steps: The number of local steps of each client of the cohort.
            down: The bytes that a client receives.
            up: The bytes that it sends.
        """
        offline = {client: Dropped(OFFLINE) for client in cohort if not self._is_online(round, client)}
        failed = {client: DROPPED_OUT for client in cohort if client not in offline and self._drops_out(round, client)}
        if self.devices is None or self.step_seconds is None:
            return Attendance(offline, failed)
        seconds = {
            client: self.devices.client_seconds(self.seed, round, client, down, up, count * self.step_seconds)
            for client, count in zip(cohort, steps, strict=True)
            if client not in offline
        }
        if self.deadline is not None:
            late = [client for client, took in seconds.items() if took > self.deadline]
            failed |= {client: MISSED for client in late if client not in failed}
            if failed:
                return Attendance(offline, failed, self.deadline)
        return Attendance(offline, failed, max(seconds.values(), default=0.0))

    def _is_online(self, round: int, client: int) -> bool:
        if self.diurnal is None:
            return True
        draw = keyed_rng(self.seed, "online", round, client).random()
        return draw < self.diurnal.probability(self.seed, round, client)

    def _drops_out(self, round: int, client: int) -> bool:
        return self.dropout > 0 and keyed_rng(self.seed, "drop-out", round, client).random() < self.dropout
