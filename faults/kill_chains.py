"""Kills (SIGKILL) in a row: of a run and of each resume, soon after it began, until it ends with the same bits.

A run is called from Python in a forked process, without the command line and without worker processes, and a kill is
at one of its next file operations, so that a case has up to 30 kills and many of them are in the middle of a save.
"""

import os
import signal
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import keel
from faults import _runs
from faults._commands import Process
from faults._runs import ALGORITHMS, result
from faults._tally import injected
from keel.core import replay
from keel.runs import environment

ROUNDS = 10
SOON = 100
"""A kill is at one of so many next file operations: the start of a resume and up to two rounds."""
KILLS = 30


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    algorithm, out = rng.choice(ALGORITHMS), folder / "out"
    expected = undisturbed(algorithm)
    for number in range(KILLS + 1):
        at = rng.randrange(SOON) if number < KILLS else None
        ended = Process(folder, lambda: start_or_resume(algorithm, out), at, _kill).wait()
        if ended.code == 0:
            break
        if ended.code != -signal.SIGKILL:
            return f"{algorithm}: exit code {ended.code} after {number} kills, and {ended.err[-300:]!r}"
        injected["kills"] += 1
    left = [path.name for path in out.rglob(".*") if path.name != ".lock"]
    if left:
        return f"{algorithm}: temporary files are left: {left}"
    same = result(out) == expected
    return None if same else f"{algorithm}: another result after {number} kills"


def start_or_resume(algorithm: str, out: Path) -> None:
    if out.exists():
        keel.resume(out)
    else:
        keel.run(_runs.spec(algorithm) | {"rounds": ROUNDS}, out=out)


@cache
def undisturbed(algorithm: str) -> Any:
    """The result of an undisturbed run, in this process: what it imports need not be imported in each case."""
    _skip_what_is_slow()
    out = Path(mkdtemp(prefix="keel-undisturbed-")) / "run"
    start_or_resume(algorithm, out)
    return result(out)


@cache
def _skip_what_is_slow() -> None:
    """Hash the source files once, and record no gradients, which takes longer than the rounds."""
    environment.source_sha256 = cache(environment.source_sha256)
    replay.REPLAY_LIMIT = 0


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
