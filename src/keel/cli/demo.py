"""The runs of `keel demo`: a task of the ladder (docs/reproduction.md), small enough to run in a minute."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from keel.config.defaults import make_spec
from keel.config.overrides import merge
from keel.report.picture import Deviation
from keel.runs.folder import RunFolder
from keel.runs.parallel import Job

TITLE = "Handwritten digits, 100 clients with one class each, one per round"
"""The task, for the terminal and the page."""
HIDDEN = ".deviation"
"""The folder of the run that measures the deviation: hidden, so that it is no method of a report on the demo."""


def demo_jobs(out: Path, seeds: int, rounds: int | None) -> list[Job]:
    """Return a run for each method of demo.toml and each seed."""
    table, changed = _table(), {} if rounds is None else {"rounds": rounds}
    specs = [
        make_spec(merge(table["task"], method, changed, {"seed": seed}))
        for method in table["methods"]
        for seed in range(seeds)
    ]
    return [Job(spec, out / spec.label) for spec in specs]


def deviation_job(out: Path, rounds: int | None) -> Job:
    """Return the run that measures how far momentum is from the direction of all clients."""
    table, changed = _table(), {} if rounds is None else {"rounds": rounds}
    spec = make_spec(merge(table["task"], table["deviation"], changed))
    return Job(spec, out / HIDDEN / spec.label)


def measured_deviation(folder: RunFolder) -> Deviation:
    """Return the deviation that a run recorded, by tau, from the round on in which all have one."""
    measured = [(record["round"], record["deviation"]) for record in folder.records() if "deviation" in record]
    taus = folder.spec.evaluation.deviation
    common = [(t, values) for t, values in measured if all(values.get(str(tau)) is not None for tau in taus)]
    return {tau: [(t, float(values[str(tau)] or 0.0)) for t, values in common] for tau in taus}


def _table() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("demo.toml").read_text(encoding="utf-8"))
