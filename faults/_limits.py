"""A limit of processor time and memory for a case that runs in this process."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path


class Exceeded(BaseException):
    """The time limit. It is no Exception, so that Keel cannot take it for the error of a user's code."""


@contextmanager
def limited(seconds: float, gigabytes: float = inf) -> Iterator[None]:
    """Raise `Exceeded` after this processor time, and let allocations of further address space fail above the limit."""

    def expire(number: int, frame: object) -> None:
        raise Exceeded(f"it takes more than {seconds:g} s of processor time")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, expire)
    resource.setrlimit(resource.RLIMIT_AS, (soft if gigabytes == inf else used + int(gigabytes * 1e9), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
