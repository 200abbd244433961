"""What the catalog knows of a data set before it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keel.data.store import data_folder

if TYPE_CHECKING:
    from keel.data.dataset import Dataset
    from keel.data.fetch import Download


@dataclass(frozen=True)
class CatalogEntry:
    """A data set that can be named in a spec: its loader and the files that the loader reads.

    Args:
        load: Returns the data set. Its keyword-only parameters are the data set's settings in a spec, the first line
            of its docstring is the title that `keel data list` prints.
        natural: Whether the data set can have natural clients, so that `data.partition = "key"` is allowed; None if
            that is only known once it is loaded.
        downloads: Files that `keel data get` downloads.
        files: Files that the user places in the data folder. A name may be a glob pattern.
        address: Where the user gets `files` from.

    A data set without downloads and files is embedded in a package, or reads files that its settings name.
    """

    load: Callable[..., "Dataset"]
    natural: bool | None = False
    downloads: tuple["Download", ...] = ()
    files: tuple[str, ...] = ()
    address: str = ""

    @property
    def needs_files(self) -> bool:
        """Whether the loader reads files from the data folder."""
        return bool(self.downloads or self.files)

    @property
    def title(self) -> str:
        return (self.load.__doc__ or "").partition("\n")[0]

    def missing(self) -> list[str]:
        """Return the names of the files that are not in the data folder."""
        folder = data_folder()
        not_downloaded = [name for download in self.downloads for name in download.missing(folder)]
        return not_downloaded + [name for name in self.files if not any(folder.glob(name))]
