"""Two processes on one folder: one writes, the other is refused in one line, and none waits for a lock that is left."""

import os
import signal
import time
from pathlib import Path
from random import Random

from faults._commands import RUNS, Process, command, difference, reference


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    name = rng.choice(RUNS)
    if rng.random() < 0.5:  # a first process is killed, and leaves its lock
        first = Process(folder, command(name, folder), rng.randrange(reference(name).operations), _kill)
        first.wait()
    both = []
    for number in range(2):
        both.append(Process(folder, command(name, folder), err=f"stderr{number}"))
        time.sleep(rng.choice([0.0, rng.uniform(0, reference(name).seconds)]))
    ended = [process.wait() for process in both]
    if any(process.left() for process in both):
        return f"{name}: processes are left"
    codes = sorted(end.code for end in ended)
    if codes not in ([0, 0], [0, 2]):  # the second may begin after the first has ended
        return f"{name}: exit codes {codes}: {[end.err for end in ended]}"
    refused = [end for end in ended if end.code == 2]
    if not all(end.has_one_line for end in refused):
        return f"{name}: {refused[0].err!r}"
    return difference(name, folder)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
