"""The runs of `keel demo`: a task of the ladder (docs/reproduction.md), small enough to run in a minute."""

import tomllib
from importlib.resources import files
from pathlib import Path

from keel.config.defaults import make_spec
from keel.config.overrides import merge
from keel.runs.parallel import Job


def demo_jobs(out: Path, seeds: int, rounds: int | None) -> list[Job]:
    """Return a run for each method of demo.toml and each seed."""
    table = tomllib.loads(files(__package__).joinpath("demo.toml").read_text(encoding="utf-8"))
    changed = {} if rounds is None else {"rounds": rounds}
    specs = [
        make_spec(merge(table["task"], method, changed, {"seed": seed}))
        for method in table["methods"]
        for seed in range(seeds)
    ]
    return [Job(spec, out / spec.label) for spec in specs]
