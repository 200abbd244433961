"""A wall clock that jumps back or far ahead during a run, and time stamps of files in the future: the same result."""

import os
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from faults._commands import Process, command, difference, pick, reference

JUMPS = (-10.0 * 365 * 86_400, -86_400.0, -1.0, 1.0, 86_400.0, 50.0 * 365 * 86_400)


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    name = pick(rng)
    number = rng.randrange(reference(name).operations)
    jump, before = rng.choice(JUMPS), (time.time, time.time_ns)
    stop = rng.random() < 0.5

    def jump_and_stop() -> None:
        time.time = lambda: before[0]() + jump
        time.time_ns = lambda: before[1]() + int(jump * 1e9)
        with suppress(FileNotFoundError):  # another process renames its files meanwhile
            for file in folder.rglob("*"):
                os.utime(file, (time.time(), time.time()))
        if stop:
            os._exit(1)

    process = Process(folder, command(name, folder), number, jump_and_stop)
    ended = process.wait()
    if process.left():
        return f"{name}: processes are left"
    if ended.code != 0 and not stop:
        return f"{name}: exit code {ended.code} after the clock jumped by {jump:g} s, and {ended.err!r}"
    return difference(name, folder)
