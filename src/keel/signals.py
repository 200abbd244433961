"""Ctrl-C (SIGINT), SIGTERM and SIGHUP, which end a command or a run in the same way.

Only the main thread of a process can handle signals: elsewhere the functions here do nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic
from types import FrameType
from typing import Any

ENDING: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
if hasattr(signal, "SIGHUP"):
    ENDING += (signal.SIGHUP,)
REPEATED = 0.5
"""Seconds within which a second signal is a repetition of the first: timeout(1) and a closed terminal send two."""


@dataclass
class _Received:
    """The signals since the outermost context of this module began."""

    contexts: int = 0
    first: int | None = None
    count: int = 0
    last_time: float = -inf
    notice: str = ""

    def add(self, number: int) -> bool:
        """Note a signal. Return False if it is a repetition."""
        is_new = monotonic() - self.last_time > REPEATED
        if self.first is None and self.notice and sys.stderr.isatty():
            os.write(sys.stderr.fileno(), f"\n{self.notice}\n".encode())
        self.first = self.first or number
        self.count += is_new
        self.last_time = monotonic() if is_new else self.last_time
        return is_new


_received = _Received()


def is_ending() -> bool:
    """Return whether a signal has been received that ends the command or the run."""
    return _received.first is not None


def is_urgent() -> bool:
    """Return whether a second signal has been received, which does not wait for the end of a round."""
    return _received.count > 1


def exit_code() -> int:
    """Return the exit code of a command that was interrupted: 128 and the number of the signal, as shells have it."""
    return 128 + (_received.first or signal.SIGINT)


@contextmanager
def raising(notice: str = "") -> Iterator[None]:
    """Let every signal raise a KeyboardInterrupt, also if this process was started with SIGINT ignored.

    Args:
        notice: A line that is printed at the first signal if standard error is a terminal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _received.add(number):
            raise KeyboardInterrupt

    before, _received.notice = _received.notice, notice
    try:
        with _handled_by(interrupt):
            yield
    finally:
        _received.notice = before


@contextmanager
def recorded() -> Iterator[None]:
    """Let a signal raise nothing before the end: the code within asks `is_ending` and `is_urgent`.

    An exception can leave the lock of a future held, for which the thread of an executor then waits for ever.
    """

    def record(number: int, frame: FrameType | None) -> None:
        _received.add(number)

    with _handled_by(record):
        yield
        if is_ending():
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let the first signal set the event instead of breaking a round; a second one breaks it."""
    event = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def request_stop(number: int, frame: FrameType | None) -> None:
        if not _received.add(number):
            return
        if event.is_set():
            signal.signal(number, before[signal.Signals(number)])
            _received.last_time = -inf  # for the handler of an outer context it is no repetition
            signal.raise_signal(number)
        event.set()

    with _handled_by(request_stop, before):
        if is_ending():  # an exception in the wrong place, such as a finaliser, is lost
            event.set()
        yield event


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals, also for processes that start within, until they call `unblock`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def handle_in_worker(handler: Any) -> None:
    """Set the handler of a worker process for all signals, and unblock them."""
    for number in _not_protected():
        signal.signal(number, handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _not_protected() -> list[signal.Signals]:
    """Return the signals to handle: all but a SIGHUP that nohup has had ignored, in this process or in its parent."""
    always = (signal.SIGINT, signal.SIGTERM)
    return [number for number in ENDING if number in always or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], before: dict[signal.Signals, Any] | None = None
) -> Iterator[None]:
    """Set the handler; `before` is filled with the handlers that it replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = {} if before is None else before
    for number in _not_protected():
        replaced[number] = signal.getsignal(number) or signal.SIG_DFL  # None is a handler that Python did not set
    _received.contexts += 1
    try:
        for number in replaced:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in replaced.items():
            signal.signal(number, earlier)
        _received.contexts -= 1
        if _received.contexts == 0:
            _received.first, _received.count, _received.last_time = None, 0, -inf
