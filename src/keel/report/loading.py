"""Read run folders and group them into methods.

Folders are read as text: no model is built, and no algorithm, sampler or engine is imported, so that any folder can be
reported on.
"""

from pathlib import PurePath
from statistics import fmean
from typing import Any

import numpy as np

from keel.config.network import Network
from keel.config.overrides import flatten
from keel.config.schema import CUSTOM, NOT_COMPUTED, engine_identity
from keel.core.records import PrimaryMetric, Record, final_value, primary_metric
from keel.engines import RECORDED
from keel.report.method import Method, Table
from keel.report.recorded import client_series, other_series
from keel.report.target import Spent
from keel.runs.folder import RunFolder


def load_methods(folders: list[RunFolder], network: Network | None = None) -> list[Method]:
    """Return one method for each group of runs that differ only in the seed.

    With a network (given here, or the same one in all specs), wall-clock time is that of a federation on it; otherwise
    it is the time measured on the machine that made the runs.
    """
    in_specs = {repr(folder.table.get("network")): folder.table.get("network") for folder in folders}
    if network is None and len(in_specs) == 1 and (common := next(iter(in_specs.values()))) is not None:
        network = Network(**common)
    groups: dict[str, dict[int, RunFolder]] = {}
    for folder in sorted(folders, key=lambda folder: not folder.ended):
        key = repr((folder.title, shared_fields(folder), _task(folder), primary_metric(folder.environment)))
        # of two runs of the same seed one counts, a finished one if there is one
        groups.setdefault(key, {}).setdefault(folder.table["seed"], folder)
    members = [list(group.values()) for group in groups.values()]
    labels = labels_of([group[0] for group in members])
    return [_load_method(label, group, network) for label, group in zip(labels, members, strict=True)]


def _load_method(label: str, group: list[RunFolder], network: Network | None) -> Method:
    primary = primary_metric(group[0].environment)
    histories = [folder.records() for folder in group]
    evaluations = [_evaluations(history, primary) for history in histories]
    seeds = [folder.table["seed"] for folder in group]
    begun = [evaluation for evaluation in evaluations if evaluation]
    rounds = sorted(set.intersection(*map(set, begun))) if begun else []
    traffic = [np.cumsum([r["bytes_down"] + r["bytes_up"] for r in history]) for history in histories if history]
    clocks = [
        np.cumsum(_round_seconds(folder, history, network))
        for folder, history in zip(group, histories, strict=True)
        if history
    ]
    columns = np.array(rounds, dtype=np.int64) - 1
    summaries = [folder.summary for folder in group]
    finals = [value for s in summaries if s is not None and (value := final_value(s)) is not None]
    status = _status({"unfinished" if s is None else s["status"] for s in summaries})
    last = _first_of_last(group[0].table) if status == "finished" else None
    total, budget = _totals(group[0].table["rounds"], histories, traffic, clocks)
    return Method(
        label=label,
        table=group[0].table,
        shared=shared_fields(group[0]),
        primary=primary,
        task=_task(group[0]),
        seeds=seeds,
        evaluated=[seed for seed, evaluation in zip(seeds, evaluations, strict=True) if evaluation],
        rounds=np.array(rounds, dtype=np.int64),
        values=np.array([[evaluation[t][0] for t in rounds] for evaluation in begun]),
        loss=np.array([[evaluation[t][1] for t in rounds] for evaluation in begun]),
        bytes=_mean_at(columns, traffic),
        seconds=_mean_at(columns, clocks),
        total=total,
        budget=budget,
        final=None if len(finals) < len(group) else finals,
        other=other_series(histories, primary.name, last),
        clients=client_series(histories, last),
        status=status,
        folders=group,
    )


def _evaluations(history: list[Record], primary: PrimaryMetric) -> dict[int, tuple[float, float]]:
    """Return the primary metric and the test loss of the rounds that were evaluated."""
    records = ((r["round"], r.get(primary.name), r.get("test_loss")) for r in history)
    return {
        t: (float(value), np.nan if loss is None else loss)
        for t, value, loss in records
        if isinstance(value, int | float)
    }


def _first_of_last(table: Table) -> int:
    """Return the first of the rounds over which final values are averaged."""
    return table["rounds"] - table["evaluation"]["last"] + 1


def _status(states: set[str]) -> str:
    """Return the status of a method: the worst of its runs'."""
    worst_first = ("diverged", "interrupted", "unfinished", "stopped")
    return next((status for status in worst_first if status in states), "finished")


def _totals(
    planned: int, histories: list[list[Record]], traffic: list[np.ndarray], clocks: list[np.ndarray]
) -> tuple[Spent, Spent]:
    """Return what the rounds that were run took, and what all planned rounds take at the mean round."""
    timed = [clock for clock in clocks if len(clock)]
    total = Spent(
        max(map(len, histories)),
        round(fmean([run[-1] for run in traffic])) if traffic else 0,
        fmean([clock[-1] for clock in timed] or [0.0]),
    )
    budget = Spent(
        planned,
        round(fmean([planned * run[-1] / len(run) for run in traffic])) if traffic else 0,
        fmean([planned * clock[-1] / len(clock) for clock in timed] or [0.0]),
    )
    return total, budget


def _round_seconds(folder: RunFolder, history: list[Record], network: Network | None) -> list[float]:
    """Return the wall-clock time of each round: measured, or estimated for a federation on the network."""
    measured = folder.seconds()
    if network is None or not measured:
        return measured
    # the median round has no evaluation in it, nor the start of the workers
    cohort = len(history[0]["cohort"])
    computing = float(np.median(measured)) * _processes(folder, cohort) / cohort
    seed = folder.table["seed"]
    return [
        network.round_seconds(
            seed,
            record["round"],
            record["cohort"],
            record["bytes_down"] / len(record["cohort"]),
            record["bytes_up"] / len(record["cohort"]),
            computing,
        )
        for record in history
    ]


def _processes(folder: RunFolder, cohort: int) -> int:
    """Return how many processes trained concurrently; runs of earlier versions recorded only the engine's name."""
    environment = folder.environment
    if recorded := environment.get("processes"):
        return recorded
    kind = RECORDED.get(folder.engine)
    return 1 if kind is None else kind.processes(environment["workers"], cohort)


def _mean_at(columns: np.ndarray, series: list[np.ndarray]) -> np.ndarray:
    """Return the mean of those series that are long enough, at these columns."""
    complete = [values[columns] for values in series if len(columns) and len(values) > columns[-1]]
    return np.mean(complete, axis=0) if complete else np.zeros(len(columns))


def _task(folder: RunFolder) -> tuple[Any, ...]:
    return tuple(folder.environment[what] for what in ("examples_sha256", "parameters", "loss"))


def shared_fields(folder: RunFolder) -> Table:
    """Return what the runs of one method share: the spec without the seed and without what does not change a result.

    Of the engine that is its arithmetic (batched or not), whatever the number of processes. The spec names an algorithm
    or a sampler "custom" if it was passed in Python; the environment says which one it was, except in runs of earlier
    versions.
    """
    environment = folder.environment
    table = {k: v for k, v in folder.table.items() if k not in ("seed", *NOT_COMPUTED)}
    if table["algorithm"]["name"] == CUSTOM and (cls := environment.get("algorithm_class")):
        table["algorithm"] = {**table["algorithm"], "class": cls}
    if sampler := environment.get("sampler"):
        table["participation"] = {**table["participation"], "sampler": sampler}
    engine = {**table["engine"], "name": folder.engine}
    return {**table, "engine": engine_identity(engine, _bit_identical(folder))}


def _bit_identical(folder: RunFolder) -> bool:
    """Return whether a run is bit-identical to `serial`; False for a user's engine in a run of an earlier version."""
    recorded = folder.environment.get("bit_identical")
    if recorded is not None:
        return bool(recorded)
    return folder.engine in RECORDED and RECORDED[folder.engine].bit_identical


def labels_of(folders: list[RunFolder]) -> list[str]:
    """Return the title of each algorithm, with the fields that distinguish it from others of the same title."""
    return [
        " ".join([folder.title, *(f"{k.removeprefix('algorithm.')}={_file_name(v)}" for k, v in fields.items())])
        for folder, fields in zip(folders, distinguishing_fields(folders), strict=True)
    ]


def distinguishing_fields(folders: list[RunFolder]) -> list[Table]:
    """Return the fields that distinguish each run from the others of the same title."""
    flat = [(folder.title, flatten(shared_fields(folder))) for folder in folders]
    return [
        {k: v for k, v in fields.items() if any(other.get(k) != v for name, other in flat if name == title)}
        for title, fields in flat
    ]


def _file_name(value: Any) -> Any:
    return PurePath(value).name if isinstance(value, str) and "/" in value else value
