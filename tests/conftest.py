"""Shared by the tests: the command called in this process, loops of small tasks, Ctrl-C."""

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings

from keel.cli import main
from keel.config.schema import Spec
from keel.core.loop import Loop
from keel.core.task import Task
from keel.errors import KeelError
from keel.runs.build import build
from keel.runs.run import find_run, resume, run
from keel.signals import ENDING
from keel.testing.tasks import records_of, small_network, uneven_data, uneven_loop
from tests.scheduling import Scheduling, rank

__all__ = ["make_loop", "one_line_error", "records_of", "small_network", "uneven_data", "uneven_loop"]

torch.set_num_threads(1)
os.environ |= {"OMP_NUM_THREADS": "1"}  # the processes that tests start share two cores: more threads would wait busily
os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}  # no telemetry
os.environ |= {"RAY_worker_niceness": "0"}  # at Ray's low priority its workers wait minutes for other tests
settings.register_profile("keel", deadline=None, max_examples=60)
settings.load_profile("keel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@dataclass(frozen=True)
class Called:
    """The result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def keel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Called]:
    """Call the command as a user does, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Called:
        monkeypatch.setattr(sys, "argv", ["keel", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Called(int(exit_.value.code or 0), captured.out, captured.err)

    return call


@contextmanager
def one_line_error(message: str) -> Iterator[None]:
    """Expect a KeelError of one line that contains the message."""
    with pytest.raises(KeelError) as caught:
        yield
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def make_loop(spec: Spec, task: Task, workers: int | None = None, engine: Any = None) -> Loop:
    """Return the loop of a spec on a task."""
    return build(spec, task, workers=workers, engine=engine).loop


def run_in_process(spec: Spec, path: Path) -> Any:
    """Run, resume or skip a run as a worker of a batch does, without a worker, and return its summary."""
    folder = find_run(spec, path)
    if folder is not None and folder.ended:
        return folder.summary
    return (run(spec, out=path, workers=1) if folder is None else resume(path, workers=1)).summary


class Killed(BaseException):
    """Simulates a kill: nothing after it runs."""


def kill_at(t: int) -> Callable[..., None]:
    def hook(record: dict[str, Any], *_: object) -> None:
        if record["round"] == t:
            raise Killed

    return hook


class InlineExecutor:
    """A ProcessPoolExecutor that runs each job in this process, when it is submitted."""

    def __init__(self, workers: int, context: object, initializer: Callable[..., None], initargs: tuple[Any, ...]):
        initializer(*initargs)

    def __enter__(self) -> "InlineExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # as in a worker process, also KeyboardInterrupt
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


@contextmanager
def jobs_in_process() -> Iterator[None]:
    """Run the jobs of sweeps and comparisons in this process: a worker process takes seconds to import PyTorch."""
    before = {number: signal.getsignal(number) for number in ENDING}  # a worker sets its own handlers
    executor = patch("keel.runs.parallel.ProcessPoolExecutor", InlineExecutor)
    objects = patch("keel.runs.parallel._objects", None)  # a worker keeps them until it ends: not for the next test
    with executor, objects:
        yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def in_process() -> Iterator[None]:
    with jobs_in_process():
        yield


class Command:
    """The command in a process of its own, which is forked from one that has imported PyTorch already."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keel.cli", "keel.runs.run"])

    def __init__(self, folder: Path, arguments: Sequence[str]):
        self.stderr = folder / ".stderr"
        self.process = self.context.Process(target=_command, args=(folder, list(arguments), self.stderr))
        self.process.start()

    def wait_for_records(self, folder: Path, pattern: str, records: int) -> None:
        """Wait until a metrics file has more than so many records."""
        deadline = time.monotonic() + 90
        while not any(file.read_text().count("\n") > records for file in folder.glob(pattern)):
            assert self.process.is_alive(), self.stderr.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self, number: signal.Signals, group: bool = False) -> Called:
        """Send a signal, to the children too if `group`, and wait for the end."""
        assert self.process.pid is not None
        (os.killpg if group else os.kill)(self.process.pid, number)
        self.process.join(90)
        assert self.process.exitcode is not None
        return Called(self.process.exitcode, "", self.stderr.read_text())


def _command(folder: Path, arguments: list[str], stderr: Path) -> None:
    os.setsid()  # a process group, as a terminal starts one
    os.chdir(folder)
    for descriptor, path in (1, os.devnull), (2, str(stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["keel", *arguments]
    main()


def stopped_by_ctrl_c(arguments: Sequence[str], folder: Path, metrics: str, records: int) -> None:
    """Run a command until one of its runs has more than so many records, then send Ctrl-C as a terminal does."""
    command = Command(folder, arguments)
    command.wait_for_records(folder, metrics, records)
    ended = command.stop(signal.SIGINT, group=True)
    assert ended.code == 130
    assert "the same command" in ended.err
    assert "Traceback" not in ended.err


def as_earlier_version(path: Path) -> Path:
    """Turn a run folder into one of an earlier version, which had no checksums, so that a test can edit its files."""
    (path / "manifest.json").unlink()
    for name in ("metrics.jsonl", "timings.jsonl", "summary.json", "environment.json"):
        if (path / name).is_file():
            text = re.sub(r',\s*"(crc32": "\w{8}"|format": 2)', "", (path / name).read_text())
            (path / name).write_text(text)
    return path
