"""A process that prints a line if Ray ends the process that uses it.

Ray does so after the death of its raylet (its process on this machine) or its GCS (that of the cluster), without an
exception or an exit handler, so that only another process can say why. This one runs as a script and imports nothing of
Keel's, so that it starts within milliseconds.
"""

import atexit
import socket
import subprocess
import sys
from contextlib import suppress

LINE = (
    "keel: Ray ended this process, because a process of its own died (raylet or GCS); keel resume continues a run, and "
    "the same command a comparison or a sweep\n"
)
SECONDS = 0.05
"""How long the raylet may take to close its socket. It lives longer than a process that was killed itself."""


class RayWatch:
    """Prints LINE if this process ends before `stop`, and after Ray's.

    Args:
        raylet: The Unix socket of the raylet.
        gcs: The address of the GCS, HOST:PORT.
    """

    def __init__(self, raylet: str, gcs: str):
        command = [sys.executable, "-I", "-S", __file__, raylet, gcs]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        atexit.register(self.stop)  # before Ray's own handler, which ends the raylet

    def stop(self) -> None:
        """End the process that watches. May be called repeatedly."""
        atexit.unregister(self.stop)
        if self._process.returncode is None:
            self._process.communicate(b"ended in order")


def watch(path: str, gcs: str) -> None:
    """Wait until standard input ends, which nobody has written to if the process died, and print the line if it did."""
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.settimeout(SECONDS)
        raylet.connect(path)
        if not sys.stdin.buffer.read() and (_is_closed(raylet) or _refuses(gcs)):
            sys.stderr.write(LINE)


def _is_closed(raylet: socket.socket) -> bool:
    with suppress(ConnectionError):
        try:
            return not raylet.recv(1)
        except TimeoutError:
            return False
    return True


def _refuses(gcs: str) -> bool:
    host, _, port = gcs.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except OSError:
        return True
    return False


if __name__ == "__main__":
    with suppress(OSError):  # the raylet has ended already, or the terminal is closed
        watch(*sys.argv[1:])
