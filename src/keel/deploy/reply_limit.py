"""How many bytes a site may store at Flower's server: those of the replies that the training asks it for.

Flower stores what a node pushes before the server app pulls it. The server app therefore announces the size of its
replies in a file, and `keel deploy superlink` refuses what exceeds it before it is stored.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from keel.runs.files import write_atomic

FOLDER = "KEEL_SERVER_STATE"
"""Environment variable with the folder that the SuperLink and the server app share."""
MAX_TEXT = 2**20
"""Largest total size in bytes of the numbers and texts of a reply, with names and shapes of its tensors. Names of
buffers are the largest part."""
OVERHEAD = 2**20
"""Bytes that a reply may have beyond its tensors and texts, and a hundredth of its tensors: IDs of objects."""


def reply_limit(tensor_bytes: int) -> int:
    """Return the largest number of bytes that a reply with so many bytes of tensors can have in Flower's format."""
    return tensor_bytes + tensor_bytes // 100 + MAX_TEXT + OVERHEAD


def announce_reply_size(run: int, tensor_bytes: int) -> None:
    """Let the SuperLink accept replies with so many bytes of tensors in a Flower run.

    A SuperLink that was not started by `keel deploy superlink` has no folder for it, and accepts everything.
    """
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(Path(folder) / f"replies-{run}", [str(reply_limit(tensor_bytes)).encode()])


def announced_limits(folder: Path, largest: int) -> Callable[[int], int]:
    """Return a function from a Flower run to the bytes of a reply: as announced by its server app, or `largest`.

    Other apps than those of `server_app` announce nothing.
    """

    def limit_of(run: int) -> int:
        file = folder / f"replies-{run}"
        return int(file.read_text(encoding="ascii")) if file.exists() else largest

    return limit_of


class ReplyQuota:
    """Counts what each node may still push in each run.

    A message that is delivered to a node allows one more reply. At most two replies are allowed at a time, because a
    late reply to an earlier message may still be on its way. After a restart of the server one is allowed.
    """

    def __init__(self, limit_of: Callable[[int], int]):
        self.limit_of = limit_of
        self._left: dict[tuple[int, int], int] = {}
        self._lock = Lock()  # Flower handles requests in threads

    def deliver(self, run: int, node: int) -> None:
        """A message of the run has been delivered to the node."""
        limit = self.limit_of(run)
        with self._lock:
            self._left[run, node] = min(self._left.get((run, node), limit) + limit, 2 * limit)

    def take(self, run: int, node: int, size: int) -> bool:
        """Return whether the node may push so many bytes, which are then subtracted from what it may push."""
        limit = self.limit_of(run)
        with self._lock:
            left = min(self._left.get((run, node), limit), 2 * limit)
            self._left[run, node] = left - size if size <= left else left
            return size <= left

    def give_back(self, run: int, node: int, size: int) -> None:
        """The bytes that the node has pushed were not stored."""
        with self._lock:
            self._left[run, node] = self._left.get((run, node), 0) + size
