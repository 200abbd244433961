"""Kills (SIGKILL) of Ray's workers, of Ray's own processes, or of the command that uses Ray.

Killed workers are replaced, and the run ends with the bits of `serial`. After a kill of Ray or of the command no
process is left, one line reports it, and `keel resume` ends with these bits. The cases that kill workers share one Ray.
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
from faults._shared_ray import STARTS, shared_ray
from faults._tally import injected

ROUNDS = 6
SECONDS = 180.0
"""The time in which a command must have a record, or its processes must have ended."""
OF_RAY = ("raylet", "gcs_server")
ACTOR = "ray::Trainer"
NOT_STARTED = "engine.address: no Ray at"
"""How the error begins when Ray did not start in its time, as on a busy machine."""


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
    shared_ray()
    how = rng.choices([kill_workers, kill_command], [3, 1])[0]
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
                workers = actors()
                _kill(workers if rng.random() < 0.3 else rng.sample(workers, min(1, len(workers))))

    keel.run(table(algorithm, "ray"), out=out, hooks=[Killer()])
    return None


def kill_command(rng: Random, algorithm: str, out: Path) -> str | None:
    """Kill a command that has started its own Ray, or a process of this Ray, and resume the run."""
    for _ in range(STARTS):
        with started(table(algorithm, "ray"), out) as process:
            wait_for_record(process, out)
            family = descendants(process.pid)
            of_ray = [pid for pid in family if any(name in command_of(pid) for name in OF_RAY)]
            _kill([rng.choice([process.pid, *of_ray])])
            problem = ended(process, out)
        if problem != NOT_STARTED:
            break
    deadline = time.monotonic() + SECONDS
    while any(map(is_alive, family)):
        if time.monotonic() > deadline:
            return f"processes are left: {[command_of(pid)[:60] for pid in family if is_alive(pid)]}"
        time.sleep(0.05)
    if problem is None:
        keel.resume(out)
    return problem


def actors() -> list[int]:
    """The workers of the shared Ray."""
    return [pid for pid in descendants(os.getpid()) if command_of(pid).startswith(ACTOR) and is_alive(pid)]


def started(spec: dict[str, Any], out: Path) -> "subprocess.Popen[str]":
    """Start the command for a run."""
    out.parent.mkdir(exist_ok=True)
    file = out.parent / "spec.toml"
    file.write_text(keel.make_spec(spec).to_toml())
    command = [sys.executable, "-m", "keel", "run", str(file), "--out", str(out), "--quiet"]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_record(process: "subprocess.Popen[str]", out: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and not _has_record(out) and time.monotonic() < deadline:
        time.sleep(0.01)


def ended(process: "subprocess.Popen[str]", out: Path) -> str | None:
    """Wait until the command has ended; what is wrong with how it did."""
    try:
        _, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return "it hangs"
    lines = [line for line in err.splitlines() if not line.startswith("[")]  # that of Ray's own log
    if lines and NOT_STARTED in lines[0]:
        return NOT_STARTED
    if process.returncode not in (0, -signal.SIGKILL) and (len(lines) != 1 or not lines[0].startswith("keel: ")):
        return f"exit code {process.returncode}, and {err[-300:]!r}"
    return None if out.exists() else "it was killed before its first round"


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
