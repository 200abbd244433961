"""Commands in forked processes, with a fault at a chosen file operation.

A case forks this process, which has imported PyTorch and Keel, so that a run takes a fraction of a second. Worker
processes of comparisons, sweeps and campaigns are forked as well, not spawned, for the same reason; all else is as in
the command. Operations are counted over all processes of a case.
"""

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from mmap import mmap
from pathlib import Path
from random import Random
from struct import pack_into, unpack_from
from tempfile import TemporaryDirectory
from typing import Any

import torch

import keel.paper.campaign
import keel.runs.compare
import keel.runs.execute
import keel.runs.parallel
import keel.runs.run
import keel.runs.sweep
from keel.cli import main

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.chmod", "os.listdir"}
"""The audit events that are file operations; the functions in CALLS raise none."""
CALLS = ("fsync", "pwritev", "preadv", "ftruncate")
SETS = [
    *("--set", "rounds=5", "--set", "data.clients=12", "--set", "participation.rate=0.25", "--set", "local.epochs=1"),
    *("--set", "evaluation.last=2", "--set", "model.hidden=[4]"),
]
COMMANDS = {
    "serial": ["run", "--algorithm", "fedavg", "--engine", "serial", *SETS],
    "cohort": ["run", "--algorithm", "scaffold", "--engine", "cohort", *SETS],
    "pool": ["run", "--algorithm", "fedhbm", "--engine", "pool", "--set", "engine.workers=2", *SETS],
    "best": ["run", *SETS, "--set", "evaluation.select=true", "--set", "evaluation.on=validation"],
    "compare": ["compare", "--methods", "fedavg,feddyn", "--seeds", "1", "--json", *SETS],
    "sweep": ["sweep", "--algorithm", "fedavg", "--over", "local.lr=0.1,0.2", "--json", *SETS],
    "campaign": ["campaign", "tau", "--scale", "smoke", "--json"],
}
COMPARE_MODULE = import_module("keel.cli.compare")  # keel.cli.compare is the function
RUNS = ("serial", "cohort", "pool", "best")
LIMIT = 120.0
"""Seconds after which a process hangs."""

Fault = Callable[[], object]
Work = list[str] | Callable[[], object]
"""The arguments of a command, or a function that does the same work without the command line."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """The exit code; negative if a signal ended it."""
    err: str
    operations: int

    @property
    def has_one_line(self) -> bool:
        lines = [line for line in self.err.splitlines() if line.strip()]
        return len(lines) == 1 and lines[0].startswith(("keel: ", "interrupted; "))


class Process:
    """A command, or a function, in a forked process, which leads a session of its own."""

    def __init__(
        self,
        folder: Path,
        work: Work,
        at: int | None = None,
        fault: Fault = lambda: None,
        err: str = "stderr",
    ):
        self.counter, self.err = mmap(-1, 8), folder / err
        self.err.touch()  # it may be killed before it has opened the file
        sys.stdout.flush()
        with warnings.catch_warnings():  # Python 3.12 warns of threads that a fork leaves behind; a case needs none
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_child(folder, work, err, self.counter, at, fault)

    @property
    def operations(self) -> int:
        """The file operations so far."""
        return int(unpack_from("q", self.counter)[0])

    def is_running(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> Ended:
        """Wait for the end.

        Raises:
            TimeoutError: It hangs.
        """
        deadline, pause = time.monotonic() + LIMIT, 0.001
        while self.is_running():
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGUSR1)  # each process prints its stack
                time.sleep(1.0)
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"it hangs; it printed\n{self.err.read_text()}")
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Ended(code, self.err.read_text(errors="replace"), self.operations)

    def members(self) -> list[int]:
        """Return the processes of the session that are alive."""
        return _in_session(self.pid)

    def left(self) -> list[int]:
        """Return the processes of the session that are alive 10 s after the command has ended."""
        deadline = time.monotonic() + 10
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def run(folder: Path, arguments: list[str]) -> Ended:
    return Process(folder, arguments).wait()


def command(name: str, folder: Path) -> list[str]:
    """Return the command that starts or continues the work in the folder."""
    if name in RUNS and (folder / "out").exists():
        return ["resume", "out", "--quiet"]
    return [*COMMANDS[name], "--quiet", "--out", "out"]


@dataclass(frozen=True)
class Reference:
    """An undisturbed command."""

    files: dict[str, bytes]
    operations: int
    seconds: float


@cache
def reference(name: str) -> Reference:
    with TemporaryDirectory(prefix="keel-fault-") as folder:
        began = time.monotonic()
        ended = run(Path(folder), command(name, Path(folder)))
        assert ended.code == 0, ended.err
        return Reference(results(Path(folder) / "out"), ended.operations, time.monotonic() - began)


def difference(name: str, folder: Path) -> str | None:
    """Finish the command in the folder, and return how its files differ from those of an undisturbed one."""
    ended = run(folder, command(name, folder))
    if ended.code != 0:
        return f"{name}: it cannot be continued: exit code {ended.code}, {ended.err!r}"
    expected = reference(name).files
    found = results(folder / "out")
    if found.keys() != expected.keys():
        return f"{name}: other files: {sorted(found.keys() ^ expected.keys())}"
    differing = [file for file in expected if found[file] != expected[file]]
    return f"{name}: other content: {differing}" if differing else None


def results(folder: Path) -> dict[str, bytes]:
    """Return what equal work has in common: the records, the summaries without their time, and results made of them.

    A folder that was not complete when its process was killed keeps a temporary name, which nothing reads.
    """
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder)
        if path.name == ".lock" or any(part.startswith(".") for part in path.parts[:-1]):
            continue
        if path.name == "summary.json":
            summary = json.loads(file.read_text())
            found[str(path)] = json.dumps({**summary, "seconds": None, "crc32": None}).encode()
        elif path.name in ("metrics.jsonl", "best.toml", "spec.toml", "data.json", "model.json"):
            found[str(path)] = file.read_bytes()
        elif path.name.startswith("."):
            found[str(path)] = b"a temporary file"
    return found


def pick(rng: Random) -> str:
    """Return the name of a command; single runs, which are cheap, more often."""
    return rng.choice(["serial", "cohort", "pool", "best"] * 3 + ["compare", "sweep", "campaign"])


def _run_child(folder: Path, work: Work, err: str, counter: mmap, at: int | None, fault: Fault) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for descriptor, file in (0, os.devnull), (1, os.devnull), (2, err):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        faulthandler.register(signal.SIGUSR1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts a process in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if nohup started this program
        _fork_workers()
        COMPARE_MODULE._write_page = lambda folder, *_: folder  # drawing takes longer than all runs
        keel.runs.execute.CHECKPOINT_SECONDS, keel.runs.execute.SAVING_SHARE = 0.0, 0  # every round is saved
        _count_operations(str(folder), counter, at, fault)
        _do(work)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _do(work: Work) -> None:
    if callable(work):
        work()
    else:
        sys.argv = ["keel", *work]
        main()


def _fork_workers() -> None:
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork")  # type: ignore[assignment]


def _count_operations(folder: str, counter: mmap, at: int | None, fault: Fault) -> None:
    """Count the file operations below the folder, and call `fault` at the given one."""

    def operation() -> None:
        (number,) = unpack_from("q", counter)
        pack_into("q", counter, 0, number + 1)
        if number == at:
            fault()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = str(Path(arguments[0]).absolute())
            if path.startswith(folder) and "stderr" not in path:
                operation()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            operation()
            return function(*arguments)

        return call

    sys.addaudithook(audit)
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def _in_session(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, *_, of = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def _warm_up() -> None:
    """Train once in this process, so that the first steps of PyTorch need not be repeated in every case."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="keel-fault-") as folder:
        for engine in ("serial", "cohort"):
            keel.run({"rounds": 1, "engine": {"name": engine}}, out=Path(folder) / engine)
    gc.freeze()


_warm_up()
