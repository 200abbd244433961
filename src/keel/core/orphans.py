"""Worker processes that end when their parent is killed."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

INTERVAL = 1.0
"""Seconds between two checks."""


def end_with_parent() -> None:
    """End this worker process soon after its parent has died, whatever it computes then.

    A run survives a kill at any moment, so nothing is saved first: the command that continues need not wait.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        # processes that were forked later can keep the sentinel open, so the parent's id is compared as well
        while not wait([parent.sentinel], timeout=INTERVAL) and os.getppid() == parent.pid:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()
