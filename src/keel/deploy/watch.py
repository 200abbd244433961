"""What the server reports about single sites: those that contribute nothing, and those whose values are far outside."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.core.client import ClientResult
from keel.core.observers import Observer, RoundEnd
from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.deploy.descriptions import Description
from keel.deploy.flower_adapter import log

FACTOR = 5.0
"""A norm or a loss is far outside if it is above this many times the median of the other sites. A loss must also be at
least that of the first round: late in a training the losses of honest sites differ by more than this."""
OUTLIER_ROUNDS = 3
"""Rounds of a site in a row that are far outside before it is reported."""
SMALL = 1 / 20
"""A norm is far below the others if it is less than this part of their median."""
MANY_EXAMPLES = 20
"""A site states unusually many examples if they are more than this many times the median of the other sites."""
OPPOSITE, AGREEMENT = -0.2, 0.1
"""A report points against the others if its cosine with their mean direction is below the first, while the mean cosine
between the others is above the second. Near the end of a training, and on very different data, all reports point away
from each other."""
MEANINGS = {
    "norm": "its norm is far above that of the other sites",
    "small norm": "its norm is far below that of the other sites",
    "loss": "its loss is far above that of the other sites",
    "direction": "its report points against those of the other sites",
    "examples": f"it states more than {MANY_EXAMPLES} times as many examples as the other sites",
}
"""What an outlier is, by the name of the value."""


class SiteLosses(Observer):
    """Adds the training loss of each site to the record of a round, and the direction of its report.

    `cosines` has the cosine of a site's `delta` with the sum of the other sites' normalized `delta`, and `agreements`
    the mean cosine between two of these others: the length of a report and the number of examples that a site states do
    not enter. The deltas of a round are held until it ends, as adaptive clipping does.
    """

    def round_started(self, round: int) -> None:
        self.losses: dict[str, float] = {}
        self.deltas: dict[str, Tensor] = {}

    def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
        self.losses[str(client)] = float(result.loss)
        if "delta" in result.message:
            self.deltas[str(client)] = result.message["delta"]

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any]:
        deltas, self.deltas = self.deltas, {}
        found = directions(deltas)
        if not found:
            return {"losses": self.losses}
        return {
            "losses": self.losses,
            "cosines": {site: direction.cosine for site, direction in found.items()},
            "agreements": {site: direction.agreement for site, direction in found.items()},
        }


class Direction(NamedTuple):
    """Where the report of a site points."""

    cosine: float
    """With the sum of the other reports, all normalized."""
    agreement: float
    """Mean cosine between two of the others."""


def directions(deltas: Mapping[str, Tensor]) -> dict[str, Direction]:
    """Return the direction of each tensor, if there are at least three. One that is zero or infinite has none."""
    norms = {site: float(torch.linalg.vector_norm(delta.double())) for site, delta in deltas.items()}
    scales = {site: 1 / norm for site, norm in norms.items() if 0 < norm < float("inf")}
    if len(scales) < 3:
        return {}
    total = torch.zeros_like(next(iter(deltas.values())), dtype=torch.float64)
    for site, scale in scales.items():
        total.add_(deltas[site].double(), alpha=scale)
    result, count = {}, len(scales) - 1
    for site, scale in scales.items():
        own = deltas[site].double() * scale
        others = total - own
        length = float(torch.linalg.vector_norm(others))
        if length > 0:
            agreement = (length**2 - count) / (count * (count - 1))
            result[site] = Direction(round(float((own * others).sum()) / length, 6), round(agreement, 6))
    return result


class SiteWatch(Observer):
    """Logs a warning when a report is rejected, while a site contributes nothing, or while its values are far outside.

    Args:
        records: The earlier rounds of a resumed run.
        audit: Called with each rejected report and each outlier, for the audit log.

    Attributes:
        outliers: What is far outside in the last round, a text for each site and value.
    """

    def __init__(self, records: Sequence[Record], idle_rounds: int, audit: Callable[..., object]):
        self.records, self.idle_rounds, self.audit = list(records), idle_rounds, audit
        self.outliers: list[str] = []

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        self.records.append(record)
        for number in record.get("rejected", []):
            reason = record["dropped"][str(number)]
            log.warning("round %d: dropped site %d: %s", record["round"], number, reason)
            self.audit("drop", phase=f"round {record['round']}", site=number, reason=reason)
        for site, (rounds, reason) in _without_reply(self.records).items():
            if rounds % self.idle_rounds == 0:
                log.warning("site %s has contributed nothing in %d rounds: %s", site, rounds, reason)
        self.outliers = []
        for site, values in outliers(self.records).items():
            for value, far in values.items():
                if far[-1] == record["round"]:
                    self.outliers.append(f"site {site}: {MEANINGS[value]} since round {far[0]}")
                    log.warning("%s", self.outliers[-1])
                    self.audit("outlier", site=int(site), value=value, rounds=far)


def many_examples(descriptions: Iterable[Description]) -> list[int]:
    """Return the sites that state unusually many examples."""
    stated = {description["site"]: description["examples"] for description in descriptions}
    others = {site: [count for other, count in stated.items() if other != site] for site in stated}
    return [site for site, rest in others.items() if rest and stated[site] > MANY_EXAMPLES * median(rest)]


def idle_sites(records: Sequence[Record], idle_rounds: int) -> dict[str, str]:
    """Return the sites without a valid reply in their last `idle_rounds` rounds, or in any round, and why."""
    contributed = {str(site) for record in records for site in record["cohort"]}
    return {
        site: f"no valid reply in {rounds} rounds: {reason}"
        for site, (rounds, reason) in _without_reply(records).items()
        if rounds >= idle_rounds or site not in contributed
    }


def _without_reply(records: Iterable[Record]) -> dict[str, tuple[int, str]]:
    """Return the number of rounds since each site's last valid reply and the last reason, for sites with any."""
    rounds: dict[str, tuple[int, str]] = {}
    for record in records:
        for site in record["cohort"]:
            rounds.pop(str(site), None)
        for name, reason in record.get("dropped", {}).items():
            rounds[name] = (rounds.get(name, (0, ""))[0] + 1, reason)
    return rounds


def outliers(records: Iterable[Record]) -> dict[str, dict[str, list[int]]]:
    """Return the sites of which a value was far outside in `OUTLIER_ROUNDS` of their rounds in a row.

    Returns:
        For each site and each such value (as in `MEANINGS`), the rounds in which it was far outside.
    """
    streaks: dict[tuple[str, str], list[int]] = {}
    reported: dict[str, dict[str, list[int]]] = {}
    first_loss: float | None = None
    for record in records:
        row: dict[str, Any] = dict(record)
        losses = [loss for loss in row.get("losses", {}).values() if loss is not None]
        if first_loss is None and losses:
            first_loss = median(losses)
        for site, value, far in _far_values(row, first_loss or 0.0):
            streak = streaks[site, value] = [*streaks.get((site, value), []), record["round"]] if far else []
            if len(streak) >= OUTLIER_ROUNDS:
                rounds = reported.setdefault(site, {}).setdefault(value, [])
                rounds += [round for round in streak if round not in rounds]
    return reported


def _far_values(record: Mapping[str, Any], first_loss: float) -> Iterable[tuple[str, str, bool]]:
    """Yield each site and value of a record, and whether it is far outside."""
    for key, value, least in ("norms", "norm", 0.0), ("losses", "loss", first_loss):
        numbers = {site: number for site, number in record.get(key, {}).items() if number is not None}
        for site, number in numbers.items():
            others = [other for name, other in numbers.items() if name != site]
            yield site, value, len(others) >= 2 and number >= least and number > FACTOR * median(others)
            if value == "norm":
                yield site, "small norm", bool(others) and number < SMALL * median_low(others)
    for site, agreement in record.get("agreements", {}).items():
        yield site, "direction", record["cosines"][site] < OPPOSITE and agreement > AGREEMENT
