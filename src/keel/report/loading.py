"""Group runs into methods, and compute what the runs of a method have in common."""

from pathlib import PurePath
from statistics import fmean
from typing import Any

import numpy as np

from keel.config.network import Network
from keel.config.overrides import flatten, make_network
from keel.core.records import final_value, primary_metric
from keel.engines import RECORDED
from keel.report.loaded_run import History, LoadedRun, Table
from keel.report.method import Method
from keel.report.recorded import client_series, common_rounds, other_series
from keel.report.target import Spent


def load_methods(runs: list[LoadedRun], network: Network | None = None) -> list[Method]:
    """Return one method for each group of runs that differ only in the seed.

    With a network (given here, or the same one in all specs), wall-clock time is that of a federation on it; otherwise
    it is the time measured on the machine that made the runs.
    """
    in_specs = {repr(run.table.get("network")): run.table.get("network") for run in runs}
    if network is None and len(in_specs) == 1 and (common := next(iter(in_specs.values()))) is not None:
        network = make_network(common)
    groups: dict[str, dict[int, LoadedRun]] = {}
    for run in sorted(runs, key=lambda run: not run.ended):
        key = repr((run.title, run.shared, _task(run), primary_metric(run.environment)))
        # of two runs of the same seed one counts, a finished one if there is one
        groups.setdefault(key, {}).setdefault(run.table["seed"], run)
    members = [list(group.values()) for group in groups.values()]
    labels = labels_of([group[0] for group in members])
    return [_load_method(label, group, network) for label, group in zip(labels, members, strict=True)]


def _load_method(label: str, group: list[LoadedRun], network: Network | None) -> Method:
    first, primary = group[0], primary_metric(group[0].environment)
    histories = [run.history for run in group]
    seeds = [run.table["seed"] for run in group]
    begun = [(seed, history) for seed, history in zip(seeds, histories, strict=True) if primary.name in history.columns]
    rounds = common_rounds([history.columns[primary.name] for _, history in begun])
    columns = rounds - 1
    traffic = [np.cumsum(history.traffic.sum(axis=1)) for history in histories if history.length]
    clocks = [np.cumsum(_round_seconds(run, network)) for run in group if run.history.length]
    summaries = [run.summary for run in group]
    finals = [value for s in summaries if s is not None and (value := final_value(s)) is not None]
    status = _status({"unfinished" if s is None else s["status"] for s in summaries})
    last = _first_of_last(first.table) if status == "finished" else None
    total, budget = _totals(first.table["rounds"], histories, traffic, clocks)
    return Method(
        label=label,
        table=first.table,
        shared=first.shared,
        primary=primary,
        task=_task(first),
        seeds=seeds,
        evaluated=[seed for seed, _ in begun],
        rounds=rounds,
        modelled=network is not None,
        values=_rows(columns, [history.columns[primary.name] for _, history in begun]),
        loss=_rows(columns, [history.column("test_loss") for _, history in begun]),
        bytes=_mean_at(columns, traffic),
        seconds=_mean_at(columns, clocks),
        total=total,
        budget=budget,
        final=None if len(finals) < len(group) else finals,
        other=other_series(histories, primary.name, last),
        clients=client_series(histories, last),
        status=status,
        runs=group,
    )


def _rows(columns: np.ndarray, series: list[np.ndarray]) -> np.ndarray:
    """Return these columns of each series; without a series, no rows."""
    return np.array([values[columns] for values in series]).reshape(len(series), len(columns))


def _first_of_last(table: Table) -> int:
    """Return the first of the rounds over which final values are averaged."""
    return table["rounds"] - table["evaluation"]["last"] + 1


def _status(states: set[str]) -> str:
    """Return the status of a method: the worst of its runs'."""
    worst_first = ("diverged", "interrupted", "unfinished", "stopped")
    return next((status for status in worst_first if status in states), "finished")


def _totals(
    planned: int, histories: list[History], traffic: list[np.ndarray], clocks: list[np.ndarray]
) -> tuple[Spent, Spent]:
    """Return what the rounds that were run took, and what all planned rounds take at the mean round."""
    timed = [clock for clock in clocks if len(clock)]
    total = Spent(
        max(history.length for history in histories),
        round(fmean([run[-1] for run in traffic])) if traffic else 0,
        fmean([clock[-1] for clock in timed] or [0.0]),
    )
    budget = Spent(
        planned,
        round(fmean([planned * int(run[-1]) / len(run) for run in traffic])) if traffic else 0,
        fmean([planned * clock[-1] / len(clock) for clock in timed] or [0.0]),
    )
    return total, budget


def _round_seconds(run: LoadedRun, network: Network | None) -> list[float]:
    """Return the wall-clock time of each round: measured, or estimated for a federation on the network."""
    history, measured = run.history, run.history.seconds
    if network is None or not measured:
        return measured
    modelled = history.column("federation_seconds")
    if not np.isnan(modelled).any() and make_network(run.table.get("network", {})) == network:
        return modelled.tolist()
    # the median round has no evaluation in it, nor the start of the workers
    sizes = np.maximum(1, history.cohort_sizes)  # nobody may have answered
    computing = float(np.median(measured)) * _processes(run, int(sizes[0])) / int(sizes[0])
    cohorts = np.split(history.cohorts, np.cumsum(history.cohort_sizes)[:-1])
    per_client = (history.traffic / np.stack([np.maximum(1, history.recipients), sizes], axis=1)).tolist()
    return [
        network.round_seconds(run.table["seed"], number, cohort.tolist() or [0], down, up, computing)
        for number, (cohort, (down, up)) in enumerate(zip(cohorts, per_client, strict=True), start=1)
    ]


def _processes(run: LoadedRun, cohort: int) -> int:
    """Return how many processes trained concurrently; runs of earlier versions recorded only the engine's name."""
    if recorded := run.environment.get("processes"):
        return recorded
    kind = RECORDED.get(run.engine)
    return 1 if kind is None else kind.processes(run.environment.get("workers", 1), cohort)


def _mean_at(columns: np.ndarray, series: list[np.ndarray]) -> np.ndarray:
    """Return the mean of those series that are long enough, at these columns."""
    complete = [values[columns] for values in series if len(columns) and len(values) > columns[-1]]
    return np.mean(complete, axis=0) if complete else np.zeros(len(columns))


def _task(run: LoadedRun) -> tuple[Any, ...]:
    environment = run.environment
    return environment["examples_sha256"], environment["parameters"], environment["loss"]


def labels_of(runs: list[LoadedRun]) -> list[str]:
    """Return the title of each algorithm, with the fields that distinguish it from others of the same title."""
    return [
        " ".join([run.title, *(f"{k.removeprefix('algorithm.')}={_file_name(v)}" for k, v in fields.items())])
        for run, fields in zip(runs, distinguishing_fields(runs), strict=True)
    ]


def distinguishing_fields(runs: list[LoadedRun]) -> list[Table]:
    """Return the fields that distinguish each run from the others of the same title."""
    flat = [(run.title, flatten(run.shared)) for run in runs]
    groups: dict[str, list[Table]] = {}
    for title, fields in flat:
        groups.setdefault(title, []).append(fields)
    varied = {title: set(varied_fields(tables)) for title, tables in groups.items()}
    return [{k: v for k, v in fields.items() if k in varied[title]} for title, fields in flat]


def varied_fields(tables: list[Table]) -> list[str]:
    """Return the fields that do not have the same value in all tables, in the order of their first appearance."""
    first, fields = tables[0], dict.fromkeys(field for table in tables for field in table)
    return [field for field in fields if any(table.get(field) != first.get(field) for table in tables)]


def _file_name(value: Any) -> Any:
    return PurePath(value).name if isinstance(value, str) and "/" in value else value
