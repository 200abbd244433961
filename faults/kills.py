"""Kills (SIGKILL) of a command or one of its worker processes, up to three in a row: it continues to the same bits."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from faults._commands import Ended, Process, command, difference, pick, reference
from faults._tally import injected


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    name = pick(rng)
    for _ in range(1 + seed % 3):
        how = rng.choice([at_operation, at_operation, at_time])
        process = how(rng, name, folder)
        ended = process.wait()
        injected["kills"] += ended.code in (-signal.SIGKILL, 1)
        if left := process.left():
            return f"{name}: {len(left)} processes are left after {how.__name__}"
        if not is_expected(ended):
            return f"{name}: exit code {ended.code} after a kill, and {ended.err!r}"
    return difference(name, folder)


def is_expected(ended: Ended) -> bool:
    """Return whether the command was killed, or had finished before, or reported in one line that a worker was."""
    return ended.code in (0, -signal.SIGKILL) or (ended.code == 1 and ended.has_one_line)


def at_operation(rng: Random, name: str, folder: Path) -> Process:
    """Kill the process that does the n-th file operation, or the command that started it."""
    number, parent = rng.randrange(reference(name).operations), rng.random() < 0.3

    def kill() -> None:
        os.kill(os.getsid(0) if parent else os.getpid(), signal.SIGKILL)

    return Process(folder, command(name, folder), number, kill)


def at_time(rng: Random, name: str, folder: Path) -> Process:
    """Kill the command, or one of its processes, at a random moment."""
    process = Process(folder, command(name, folder))
    time.sleep(rng.uniform(0, reference(name).seconds))
    processes = process.members()
    with suppress(ProcessLookupError, IndexError):  # it has finished
        os.kill(rng.choice([process.pid, *processes]), signal.SIGKILL)
    return process
