"""Which site's certificate each node presents to the proxy.

The proxy passes the name in the certificate (`site-0`) to `keel deploy superlink`, which binds a node to the first one
and refuses another. The server app reads the name, and so knows which site a node can be.
"""

import os
from pathlib import Path
from threading import Lock

from keel.deploy.reply_limit import FOLDER
from keel.runs.files import write_atomic


class CertifiedNodes:
    """The names by node, as files of a folder, so that they survive a restart of the server."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = Lock()  # Flower handles requests in threads

    def name_of(self, node: int) -> str | None:
        """Return the name in the certificate of a node; None if it has not come through the proxy."""
        file = self.folder / f"node-{node}"
        return file.read_text(encoding="utf-8") if file.exists() else None

    def accepts(self, node: int, name: str) -> bool:
        """Return whether the node may come with the certificate of this name. The first one binds it."""
        with self._lock:
            known = self.name_of(node)  # from the file, which an operator may remove and the server app reads
            if known is None:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomic(self.folder / f"node-{node}", [name.encode()])
            return known in (None, name)


def certified_name(node: int) -> str | None:
    """Return, in the server app, the name in the certificate of a node; None where no proxy has passed one on."""
    folder = os.environ.get(FOLDER)
    return CertifiedNodes(Path(folder)).name_of(node) if folder else None
