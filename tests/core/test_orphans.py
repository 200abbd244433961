import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from keel.core.orphans import end_with_parent

FORK = multiprocessing.get_context("fork")


def test_a_worker_that_computes_ends_after_its_parent_was_killed() -> None:
    ours, theirs = FORK.Pipe()
    parent = FORK.Process(target=_parent, args=(theirs,))
    parent.start()
    workers = [ours.recv() for _ in range(2)]
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    deadline = time.monotonic() + 20
    while any(map(_is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [worker for worker in workers if _is_alive(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert not left


def _parent(connection: Connection) -> None:
    for _ in range(2):
        worker = FORK.Process(target=_worker)
        worker.start()
        connection.send(worker.pid)
    signal.pause()


def _worker() -> None:
    end_with_parent()
    while True:  # it never waits for its parent
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
