"""A run as the report reads it: the content of its folder, checked, each file read once.

Folders are read as text: no model is built, and no algorithm, sampler or engine is imported, so that any folder can be
reported on.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from keel.config.schema import CUSTOM, engine_identity, not_computed
from keel.core.records import COMPLETE, OFFLINE, Environment, Record, Summary
from keel.engines import RECORDED
from keel.errors import KeelError
from keel.runs import validation
from keel.runs.folder import RunFolder
from keel.runs.sealed import damaged

Table = dict[str, Any]
"""A resolved spec, as read from spec.toml."""
Columns = dict[str, np.ndarray]
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that a terminal obeys instead of printing them, and those that no file can contain."""
MOST_BYTES = 2**62


@dataclass(frozen=True)
class Skipped:
    """A folder that is not in the report, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class History:
    """The records of a run by columns; row t is round t + 1."""

    length: int
    columns: Columns
    """The numbers in the records by their keys; NaN where a record has none."""
    over_clients: Columns
    """The numbers in the `clients` of the records."""
    traffic: np.ndarray
    """The bytes of each round: a column for those down, one for those up."""
    seconds: list[float]
    """The wall-clock time of each round; the last ones may be missing."""
    cohort_sizes: np.ndarray
    recipients: np.ndarray
    """The number of clients that received the broadcast, also those that did not answer."""
    cohorts: np.ndarray
    """The clients of all cohorts, one cohort after the other."""

    def column(self, name: str) -> np.ndarray:
        return self.columns.get(name, np.full(self.length, np.nan))


@dataclass(frozen=True, eq=False, repr=False)
class LoadedRun:
    """The content of a run folder."""

    path: Path
    table: Table
    environment: Environment
    summary: Summary | None
    client_statistics: dict[str, Any] | None
    model_class: str | None
    """The class of a model that was passed in Python."""
    history: History

    @property
    def title(self) -> str:
        """The algorithm's name as people write it."""
        return self.environment["title"]

    @property
    def engine(self) -> str:
        return self.environment["engine"]

    @property
    def ended(self) -> bool:
        """Whether no round is left."""
        return self.summary is not None and self.summary["status"] != "interrupted"

    @cached_property
    def shared(self) -> Table:
        """What the runs of one method share: the spec without the seed and without what does not change a result.

        Of the engine that is its arithmetic (batched or not), whatever the number of processes. The spec names an
        algorithm or a sampler "custom" if it was passed in Python; the environment says which one it was, except in
        runs of earlier versions.
        """
        table = {k: v for k, v in self.table.items() if k not in ("seed", *not_computed(self.table))}
        if table["algorithm"]["name"] == CUSTOM and (cls := self.environment.get("algorithm_class")):
            table["algorithm"] = {**table["algorithm"], "class": cls}
        if sampler := self.environment.get("sampler"):
            table["participation"] = {**table["participation"], "sampler": sampler}
        engine = {**table["engine"], "name": self.engine}
        return {**table, "engine": engine_identity(engine, self._bit_identical)}

    @property
    def _bit_identical(self) -> bool:
        """Whether it is bit-identical to `serial`; False for a user's engine in a run of an earlier version."""
        recorded = self.environment.get("bit_identical")
        if recorded is not None:
            return recorded
        return self.engine in RECORDED and RECORDED[self.engine].bit_identical


def load_run(folder: RunFolder) -> LoadedRun:
    """Read a run folder.

    Raises:
        KeelError: A file is missing or damaged, or files do not belong to the same run.
    """
    path = folder.path
    table, environment = printable(folder.table), printable(folder.environment)
    summary, records = folder.summary, folder.records()
    _check_same_run(folder, table, summary, len(records))
    return LoadedRun(
        path=path,
        table=table,
        environment=environment,
        summary=summary,
        client_statistics=printable(folder.client_statistics),
        model_class=printable(validation.read_model_class(path / "model.json"))
        if table["model"]["name"] == CUSTOM
        else None,
        history=_history(folder.metrics, records, folder.seconds()),
    )


def load_runs(folders: Iterable[RunFolder]) -> tuple[list[LoadedRun], list[Skipped]]:
    """Read run folders; those that cannot be read are in the second list."""
    runs, skipped = [], []
    for folder in folders:
        try:
            runs.append(load_run(folder))
        except KeelError as error:
            skipped.append(skipped_run(folder.path, error))
    return runs, skipped


def skipped_run(path: Path, error: KeelError) -> Skipped:
    """Return a folder with the reason why it cannot be read, which does not repeat its path."""
    reason = str(error).removeprefix("run: ").replace(f"{path}/", "")
    return Skipped(printable(str(path)), printable(" ".join(reason.split())))


def printable(value: Any) -> Any:
    """Return a value whose texts have a replacement character in place of each control character."""
    if isinstance(value, str):
        return value if value.isprintable() else CONTROL.sub("\ufffd", value)
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [each if type(each) in (int, float) else printable(each) for each in value]
    return value


def _check_same_run(folder: RunFolder, table: Table, summary: Summary | None, rounds: int) -> None:
    """Raise a KeelError if the records or the summary cannot be those of the spec."""
    planned, seed = table["rounds"], table["seed"]
    if rounds > planned:
        raise damaged(folder.metrics, f"it has {rounds} rounds, but spec.toml has {planned}")
    if summary is None:
        return
    if summary.get("seed", seed) != seed:
        raise damaged(folder.summary_file, f"it has seed {summary['seed']}, but spec.toml has {seed}")
    if summary["status"] in COMPLETE and summary.get("rounds", rounds) != rounds:
        ended = summary["rounds"]
        raise damaged(folder.summary_file, f"it has {ended} rounds, but metrics.jsonl has {rounds}")


def _history(file: Path, records: list[Record], seconds: list[float]) -> History:
    traffic = [(record["bytes_down"], record["bytes_up"]) for record in records]
    if sum(map(sum, traffic)) > MOST_BYTES:
        raise damaged(file, f"its rounds sent more than {MOST_BYTES:,} bytes")
    over_clients: list[Any] = [record.get("clients") or {} for record in records]
    return History(
        length=len(records),
        columns=_columns(records),
        over_clients=_columns(over_clients),
        traffic=np.array(traffic, dtype=np.int64).reshape(-1, 2),
        seconds=seconds[: len(records)],
        cohort_sizes=np.array([len(record["cohort"]) for record in records], dtype=np.int64),
        recipients=np.array([len(record["cohort"]) + _unanswered(record) for record in records], dtype=np.int64),
        cohorts=np.fromiter(chain.from_iterable(record["cohort"] for record in records), dtype=np.int64),
    )


def _unanswered(record: Record) -> int:
    """Return how many clients received the broadcast and did not answer, or were rejected."""
    return sum(reason != OFFLINE for reason in record.get("dropped", {}).values())


def _columns(records: list[Any]) -> Columns:
    """Return the numbers of the records by their keys, in the order in which keys first appear."""
    columns: Columns = {}
    for key in dict.fromkeys(chain.from_iterable(records)):
        values = [record.get(key) for record in records]
        kinds = set(map(type, values))
        if not kinds <= {int, float, NoneType}:  # an observer may add anything
            values = [value if type(value) in (int, float) else None for value in values]
        if kinds & {int, float}:
            columns[printable(key)] = _numbers(values)
    return {key: column for key, column in columns.items() if not np.isnan(column).all()}


def _numbers(values: list[Any]) -> np.ndarray:
    """Return numbers and None as an array; NaN in place of None and of what is not finite or huge."""
    largest = validation.LARGEST
    try:
        numbers = np.array(values, dtype=np.float64)
    except OverflowError:  # an integer of hundreds of digits
        numbers = np.array([None if value is None or abs(value) > largest else value for value in values], np.float64)
    numbers[np.abs(numbers) > largest] = np.nan
    return numbers
