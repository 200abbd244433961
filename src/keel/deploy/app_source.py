"""The app that `keel deploy doctor` runs at a site: the approved one, as the site's node does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from keel.deploy.approval import Approval


@contextmanager
def approved_source(folder: Path) -> Iterator[Path | None]:
    """Unpack the approved app of a federation's folder into a temporary folder; None if no app is approved."""
    app = Approval(folder / "approved").approved_app()
    if app is None:
        yield None
        return
    with TemporaryDirectory(prefix="keel-approved-") as scratch:
        for path, content in app.files.items():
            file = Path(scratch) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        yield Path(scratch)
