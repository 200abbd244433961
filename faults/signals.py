"""SIGINT, SIGTERM and SIGHUP at a random moment, to the command or to all its processes, sometimes two in a row.

The exit code is 128 and the number of the signal, one line says how to continue, no process is left, and the command
continues to the same bits.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from faults._commands import Process, command, difference, pick, reference

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    name = pick(rng)
    for _ in range(rng.choice([1, 1, 2])):
        number, group = rng.choice(NUMBERS), rng.random() < 0.5
        process = Process(folder, command(name, folder))
        while process.is_running() and process.operations == 0:  # before, Python's own handlers would end it
            time.sleep(0.001)
        time.sleep(rng.uniform(0, reference(name).seconds))
        _send(process, number, group)
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0, 0.01, 0.6]))
            _send(process, number, group)
        ended = process.wait()
        if left := process.left():
            return f"{name}: {len(left)} processes are left after {number.name}"
        if ended.code != 0 and (ended.code != 128 + number or not ended.has_one_line):
            return f"{name}: exit code {ended.code} after {number.name}, and {ended.err!r}"
    return difference(name, folder)


def _send(process: Process, number: int, group: bool) -> None:
    with suppress(ProcessLookupError):  # it has finished
        (os.killpg if group else os.kill)(process.pid, number)
