"""What the server reports about single sites: those that contribute nothing, and those whose values are far outside."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from keel.core.client import ClientResult
from keel.core.observers import Observer, RoundEnd
from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.deploy.flower_adapter import log

FACTOR = 5.0
"""A norm or a loss is far outside if it is above this many times the median of the other sites."""
OUTLIER_ROUNDS = 3
"""Rounds of a site in a row that are far outside before it is reported."""
WATCHED = {"norms": "norm", "losses": "loss"}


class SiteLosses(Observer):
    """Adds the training loss of each site to the record of a round."""

    def round_started(self, round: int) -> None:
        self.losses: dict[str, float] = {}

    def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
        self.losses[str(client)] = float(result.loss)

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any]:
        return {"losses": self.losses}


class SiteWatch(Observer):
    """Logs a warning while a site contributes nothing, or while its values are far outside.

    Args:
        records: The earlier rounds of a resumed run.
    """

    def __init__(self, records: Sequence[Record], idle_rounds: int):
        self.records, self.idle_rounds = list(records), idle_rounds

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        self.records.append(record)
        for site, (rounds, reason) in _without_reply(self.records).items():
            if rounds % self.idle_rounds == 0:
                log.warning("site %s has contributed nothing in %d rounds: %s", site, rounds, reason)
        for site, values in outliers(self.records).items():
            for value, far in values.items():
                if far[-1] == record["round"]:
                    log.warning(
                        "site %s: its %s is far above that of the other sites since round %d", site, value, far[0]
                    )


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
    """Return the sites whose norm or loss was far outside in `OUTLIER_ROUNDS` of their rounds in a row.

    Returns:
        For each site and each such value, the rounds in which it was far outside.
    """
    streaks: dict[tuple[str, str], list[int]] = {}
    reported: dict[str, dict[str, list[int]]] = {}
    for record in records:
        for key, value_name in WATCHED.items():
            values = {str(site): value for site, value in dict(record).get(key, {}).items()}  # type: ignore[attr-defined]
            for site, value in values.items():
                others = [other for name, other in values.items() if name != site]
                far = len(others) >= 2 and value is not None and value > FACTOR * median(others)
                streak = streaks[site, value_name] = (
                    [*streaks.get((site, value_name), []), record["round"]] if far else []
                )
                if len(streak) >= OUTLIER_ROUNDS:
                    known = reported.setdefault(site, {}).setdefault(value_name, [])
                    known += [round for round in streak if round not in known]
    return reported
