"""Kills (SIGKILL) of Ray's workers, of Ray's own processes, or of the command that uses Ray.

Killed workers are replaced, and the run ends with the bits of `serial`. After a kill of Ray or of the command no
process is left, one line reports it, and `keel resume` ends with these bits.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import keel
from faults._descendants import command_of, descendants, is_alive
from faults._runs import ALGORITHMS, result, spec
from faults._tally import injected

ROUNDS = 6
SECONDS = 120.0
"""The time in which a command must have a record, or its processes must have ended."""
OF_RAY = ("raylet", "gcs_server")


def table(algorithm: str, engine: str) -> dict[str, Any]:
    settings = {"name": engine} | ({"workers": 2} if engine == "ray" else {})
    return spec(algorithm) | {"rounds": ROUNDS, "participation": {"rate": 0.6}, "engine": settings}


@cache
def undisturbed(algorithm: str) -> Any:
    out = Path(mkdtemp(prefix="keel-undisturbed-")) / "run"
    keel.run(table(algorithm, "serial"), out=out)
    return result(out)


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    algorithm, out = rng.choice(ALGORITHMS), folder / "run"
    how = rng.choice([kill_workers, kill_workers, kill_command])
    if problem := how(rng, algorithm, out):
        return f"{algorithm}, {how.__name__}: {problem}"
    same = _without_engine(result(out)) == _without_engine(undisturbed(algorithm))
    return None if same else f"{algorithm}, {how.__name__}: another result"


def kill_workers(rng: Random, algorithm: str, out: Path) -> str | None:
    """Kill one worker, or all, while some rounds are trained."""
    rounds = set(rng.sample(range(1, ROUNDS + 1), rng.choice([1, 2])))

    class Killer(keel.Observer):
        def round_started(self, round: int) -> None:
            if round in rounds:
                workers = [pid for pid in descendants(os.getpid()) if command_of(pid).startswith("ray::")]
                _kill(workers if rng.random() < 0.3 else rng.sample(workers, min(1, len(workers))))

    keel.run(table(algorithm, "ray"), out=out, hooks=[Killer()])
    return None


def kill_command(rng: Random, algorithm: str, out: Path) -> str | None:
    """Kill the command or a process of Ray's, and resume the run."""
    out.parent.mkdir(exist_ok=True)
    keel_spec = out.parent / "spec.toml"
    keel_spec.write_text(keel.make_spec(table(algorithm, "ray")).to_toml())
    command = [sys.executable, "-m", "keel", "run", str(keel_spec), "--out", str(out), "--quiet"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + SECONDS
        while process.poll() is None and not _has_record(out) and time.monotonic() < deadline:
            time.sleep(0.01)
        started = descendants(process.pid)
        of_ray = [pid for pid in started if any(name in command_of(pid) for name in OF_RAY)]
        victim = rng.choice([process.pid, *of_ray])
        _kill([victim])
        try:
            _, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"it hangs after a kill of {command_of(victim)[:80]!r}"
    lines = [line for line in err.splitlines() if not line.startswith("[")]  # that of Ray's own log
    if process.returncode not in (0, -signal.SIGKILL) and (len(lines) != 1 or not lines[0].startswith("keel: ")):
        return f"exit code {process.returncode}, and {err[-300:]!r}"
    while any(map(is_alive, started)):
        if time.monotonic() > deadline + SECONDS:
            return f"processes are left: {[command_of(pid)[:60] for pid in started if is_alive(pid)]}"
        time.sleep(0.05)
    if not out.exists():
        return "it was killed before its first round"
    keel.resume(out)
    return None


def _has_record(out: Path) -> bool:
    with suppress(FileNotFoundError):
        return (out / "metrics.jsonl").stat().st_size > 0
    return False


def _kill(processes: list[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            injected["kills"] += 1


def _without_engine(found: tuple[bytes, dict[str, Any]]) -> tuple[bytes, dict[str, Any]]:
    metrics, summary = found
    return metrics, {name: value for name, value in summary.items() if name not in ("engine", "workers", "crc32")}
