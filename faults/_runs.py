"""Small runs that the kinds of faults share: a spec, an undisturbed run, and what equal runs have in common."""

from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import keel
from keel.runs.folder import RunFolder

ROUNDS = 6
ALGORITHMS = ("fedavg", "fedhbm", "ghbm", "scaffold")


def spec(algorithm: str, seed: int = 0) -> dict[str, Any]:
    """A run of well under a second."""
    return {
        "seed": seed,
        "algorithm": {"name": algorithm},
        "data": {"name": "digits", "clients": 10, "alpha": 0},
        "model": {"name": "linear"},
        "local": {"steps": 2, "batch": 8},
        "participation": {"rate": 0.2},
        "evaluation": {"every": 2, "last": 2},
        "engine": {"name": "serial"},
        "rounds": ROUNDS,
    }


@cache
def finished(algorithm: str, seed: int = 0) -> Path:
    """The folder of an undisturbed run."""
    folder = Path(mkdtemp(prefix="keel-finished-")) / "run"
    keel.run(spec(algorithm, seed), out=folder)
    return folder


@cache
def interrupted(algorithm: str) -> Path:
    """The folder of a run with checkpoints of two rounds, which stopped before its end as by a kill."""
    folder = Path(mkdtemp(prefix="keel-interrupted-")) / "run"
    rounds = iter(range(1, ROUNDS))
    for stop_after in (2, 4):
        start = keel.resume if folder.exists() else keel.run
        first = {"path": folder} if folder.exists() else {"spec": spec(algorithm), "out": folder}
        start(**first, stop=lambda stop_after=stop_after: next(rounds) >= stop_after)
    RunFolder(folder).summary_file.unlink()
    return folder


def copy(source: Path, folder: Path) -> RunFolder:
    return RunFolder(copytree(source, folder / "run"))


def result(path: Path) -> tuple[bytes, dict[str, Any]]:
    """What two equal runs have in common: the records, and the summary without times."""
    folder = RunFolder.open(path)
    summary: dict[str, Any] = dict(folder.summary or {})
    summary.pop("seconds", None)
    folder.final_state()
    return folder.metrics.read_bytes(), summary
