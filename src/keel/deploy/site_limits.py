"""Limits of one request at a site: its time, and the memory of the client process."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keel.deploy.flower_adapter import log
from keel.deploy.site_errors import RequestTimeout

GRACE_SECONDS = 10.0
"""Time after the timeout in which Python must be able to raise the exception; then the process is ended."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise RequestTimeout in the block after that time.

    Code that never returns to Python, such as a read from a dead network disk, does not get the exception. The process
    is ended then, and Flower replies to the server that the client app has crashed.
    """

    def raise_timeout(number: int, frame: Any) -> None:
        raise RequestTimeout(f"the request took longer than timeout_seconds = {seconds:g}")

    def end_process() -> None:
        log.critical("the request did not end %g s after its timeout; ending the client process", GRACE_SECONDS)
        os._exit(1)

    watchdog = threading.Timer(seconds + GRACE_SECONDS, end_process)
    watchdog.daemon = True
    previous = signal.signal(signal.SIGALRM, raise_timeout)
    watchdog.start()
    # Repeated, because a loader may catch everything.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        watchdog.cancel()


@contextmanager
def memory_limit(megabytes: int) -> Iterator[None]:
    """Bound the data segment of this process in the block: an allocation beyond it raises MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
