"""Client state on a site's disk.

A file is complete or absent, also after a crash. The server names the round whose state a site has to continue from,
so the state of the last round that the server counted stays until a later round counts. A report that was dropped, or
a round that a restarted server repeats, therefore does not affect the result.
"""

import re
from pathlib import Path

from filelock import FileLock

from keel.algorithms.base import ClientState, Message
from keel.core.choices import Precision
from keel.core.client_state import restored, stored
from keel.deploy.flower_adapter import log
from keel.errors import KeelError
from keel.runs.checked_tensors import checked_parts, read_checked
from keel.runs.files import write_atomic

TRAINING_ID = re.compile(r"[0-9a-f]{32}")


class SiteState:
    """The client state of one site in one run."""

    def __init__(self, folder: Path, training: str, precision: Precision = "float32", parameters: int | None = None):
        if not TRAINING_ID.fullmatch(training):
            raise KeelError(f"training must be 32 hexadecimal digits (got {training!r})")
        self.folder, self.precision, self.parameters = folder / training, precision, parameters

    def load(self, round: int) -> ClientState | None:
        """Return the client state after that round, or None if it is missing or damaged."""
        state = self._read(f"state-{round}")
        if state is None:
            return None
        return restored(state, self.precision, self.parameters)

    def save(self, round: int, state: ClientState, last_round: int) -> None:
        """Write the client state after this round. Delete that of earlier rounds, except `last_round`.

        Args:
            last_round: The last round of this site that the server counted, 0 if none.
        """
        self._write("state", round, stored(state, self.precision, self.parameters), last_round)

    def load_broadcast(self, round: int) -> Message | None:
        """Return what the server sent in the first phase of that round."""
        return self._read(f"broadcast-{round}")

    def save_broadcast(self, round: int, broadcast: Message) -> None:
        """Write what the server sent in the first phase of a round, so that the second phase need not send it again."""
        self._write("broadcast", round, broadcast)

    def _read(self, name: str) -> Message | None:
        file = self.folder / f"{name}.safetensors"
        if not file.is_file():
            return None
        try:
            return read_checked(file, required=False)[0]  # earlier versions wrote no checksums
        except (OSError, ValueError) as error:
            log.warning("%s is damaged: %s", file, error)
            return None

    def _write(self, kind: str, round: int, tensors: Message, last_round: int = 0) -> None:
        """Write a file under a lock. A process that is late with an older round keeps the files of newer ones."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            for file in self.folder.glob(f"{kind}-*.safetensors"):
                number = int(file.stem.removeprefix(f"{kind}-"))
                if number < round and number != last_round:
                    file.unlink()
            write_atomic(self.folder / f"{kind}-{round}.safetensors", checked_parts(tensors, {}))
