"""Worker processes of several runs that die."""

import os
import signal
import threading
import time

from keel.runs.objects import RunObjects
from keel.runs.parallel import executor


def _pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_the_death_of_an_idle_worker_does_not_keep_the_command_from_ending() -> None:
    """The worker that has been idle longest waits for the next job, and holds the lock for which the others wait."""

    def work() -> None:
        with executor(2, lambda *_: None, _pid_after, objects=RunObjects({})) as pool:
            futures = [pool.submit(0.3), pool.submit(0.8)]
            pool.wait(futures)
            idle, other = (future.result() for future in futures)
            assert idle != other
            os.kill(idle, signal.SIGKILL)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
