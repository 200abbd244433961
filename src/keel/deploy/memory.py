"""What a site remembers between its rounds, on its own disk: written whole or not at all, found again after a restart.

The memory of the last round that the server counted is kept until a later one counts: the server says which round it
builds on. So a report that came too late, or a round that a restarted server asks for again, leaves no trace.
"""

import re
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from keel.algorithms.base import Memory, Message
from keel.errors import KeelError
from keel.memories import Precision
from keel.runs.folder import write_whole

TRAINING = re.compile(r"[0-9a-f]{32}")


class SiteMemory:
    """One site's memories in one training."""

    def __init__(self, folder: Path, training: str, precision: Precision = "float32"):
        if not TRAINING.fullmatch(training):
            raise KeelError(f"training: {training!r}; accepted: 32 hexadecimal digits")
        self.folder, self.precision = folder / training, getattr(torch, precision)

    def of(self, round: int) -> Memory | None:
        """What was remembered after that round; None if there is nothing (any more)."""
        memory = self._read(f"memory-{round}")
        if memory is None:
            return None
        return {name: value.float() if value.is_floating_point() else value for name, value in memory.items()}

    def keep(self, round: int, memory: Memory, last: int) -> None:
        """What is remembered after this round; of those before it only that of the `last` one that counted stays."""
        kept = {n: value.to(self.precision) if value.is_floating_point() else value for n, value in memory.items()}
        self._write("memory", round, kept, last)

    def received(self, round: int) -> Message | None:
        """What came down in the first phase of that round."""
        return self._read(f"received-{round}")

    def keep_received(self, round: int, received: Message) -> None:
        """Puts by what came down in a round's first phase, so that it need not be sent again in the second."""
        self._write("received", round, received)

    def _read(self, name: str) -> Message | None:
        try:
            stored = load_file(self.folder / f"{name}.safetensors")
        except (FileNotFoundError, SafetensorError):
            return None
        return {key: value.clone() for key, value in stored.items()}  # see messages: how it lies changes bits

    def _write(self, kind: str, round: int, tensors: Message, last: int = 0) -> None:
        """One process at a time; one that is late with an older round leaves what newer ones wrote."""
        content = save({name: value.contiguous() for name, value in tensors.items()})
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            for file in self.folder.glob(f"{kind}-*.safetensors"):
                number = int(file.stem.removeprefix(f"{kind}-"))
                if number < round and number != last:
                    file.unlink()
            write_whole(self.folder / f"{kind}-{round}.safetensors", [content])
