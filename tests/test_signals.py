"""Ctrl-C, SIGTERM and SIGHUP: in a process, and in commands with worker processes."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from faults._commands import Process, command, difference
from keel import signals
from keel.errors import Interrupted
from keel.runs import parallel

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts a process in the background with it ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_raises_and_gives_the_exit_code(number: signal.Signals) -> None:
    with signals.raising():
        assert not signals.is_ending()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert signals.is_ending()
        assert signals.exit_code() == 128 + number
    assert not signals.is_ending()


def test_an_ignored_sigint_ends_a_command_and_an_ignored_sighup_does_not() -> None:
    """A shell ignores SIGINT for a process in the background, and nohup ignores SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.raising():
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_nohup_protects_worker_processes() -> None:
    received: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.handle_in_worker(lambda number, _: received.append(number))
    for number in NUMBERS:
        signal.raise_signal(number)
    assert received == [signal.SIGINT, signal.SIGTERM]


def test_the_first_signal_waits_for_the_round_and_the_second_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with signals.raising(), signals.interruptible() as interrupted:
        signal.raise_signal(signal.SIGTERM)
        assert interrupted.is_set()
        signal.raise_signal(signal.SIGTERM)  # timeout(1) sends two
        monkeypatch.setattr(signals, "REPEATED", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_recorded_signal_raises_only_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive_two() -> None:
        with signals.raising(), signals.recorded():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # timeout(1) sends two
            assert signals.is_ending()
            assert not signals.is_urgent()
            monkeypatch.setattr(signals, "REPEATED", 0.0)
            signal.raise_signal(signal.SIGTERM)
            assert signals.is_urgent()

    with pytest.raises(KeyboardInterrupt):
        receive_two()
    assert not signals.is_urgent()


class InterruptingCondition:
    """Receives a signal when the lock has been acquired, where an exception would keep the lock held."""

    def __init__(self, condition: Any):
        self.condition = condition

    def __enter__(self) -> None:
        self.condition.__enter__()
        signal.raise_signal(signal.SIGTERM)

    def __exit__(self, *error: object) -> None:
        self.condition.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.condition, name)


def test_a_signal_while_the_lock_of_a_future_is_held_does_not_keep_it_held() -> None:
    """The thread that manages the workers needs the lock of a future to set its result."""

    def wait_for_a_worker() -> None:
        with signals.raising(), parallel.executor(1, lambda *_: None, time.sleep) as pool:
            future = pool.submit(1.0)
            future._condition = InterruptingCondition(future._condition)
            pool.wait([future])

    with pytest.raises(Interrupted):
        wait_for_a_worker()


def test_a_signal_whose_exception_is_lost_ends_the_run_after_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    with signals.raising():
        Finalised()
        with signals.interruptible() as interrupted:
            assert interrupted.is_set()


def test_ctrl_c_outside_of_a_run_prints_one_line(keel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keel.runs.run.make_task", interrupt)
    called = keel("run", "--out", "run")
    assert (called.code, called.err) == (130, "keel: interrupted; run the same command again to continue\n")
    assert not Path("run").exists()


def test_a_command_whose_terminal_was_closed_has_the_exit_code_of_the_signal(
    keel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up(*_: object, **__: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # as the next line that it prints

    monkeypatch.setattr("keel.runs.run.make_task", hang_up)
    assert keel("run", "--out", "run").code == 129


@pytest.mark.parametrize(
    ("name", "number"), [("compare", signal.SIGTERM), ("sweep", signal.SIGINT), ("campaign", signal.SIGTERM)]
)
def test_a_signal_to_the_command_alone_ends_its_workers_and_the_same_command_continues(
    name: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = _with_a_record(name, tmp_path)
    os.kill(process.pid, number)
    ended = process.wait()
    assert ended.code == 128 + number
    assert ended.err == "keel: interrupted; run the same command again to continue\n"
    assert process.left() == []
    assert difference(name, tmp_path) is None


def test_workers_of_several_runs_end_after_their_parent_was_killed(tmp_path: Path) -> None:
    process = _with_a_record("compare", tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert process.left() == []
    assert difference("compare", tmp_path) is None


def _with_a_record(name: str, folder: Path) -> Process:
    """Start a command, and wait until one of its runs has a record."""
    process = Process(folder, command(name, folder))
    deadline = time.monotonic() + 60
    while not _has_a_record(folder):
        assert process.is_running()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return process


def _has_a_record(folder: Path) -> bool:
    try:
        return any(file.stat().st_size for file in folder.rglob("metrics.jsonl"))
    except FileNotFoundError:  # a temporary folder got its final name meanwhile
        return False
