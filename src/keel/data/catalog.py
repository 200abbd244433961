"""The data sets by name, and the data sets that users bring as "module:name" or in an installed package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from keel import registry
from keel.data import (
    arrays,
    cifar,
    digits,
    femnist,
    images,
    landmarks,
    leaf,
    mnist,
    shakespeare,
    stackoverflow,
    table,
    text,
)
from keel.data.dataset import Dataset
from keel.data.fetch import Download
from keel.data.schemes import PartitionScheme
from keel.data.store import data_folder
from keel.errors import KeelError
from keel.settings import call, call_imported

ENTRY_POINTS = "keel.data"


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

    load: Callable[..., Dataset]
    natural: bool | None = False
    downloads: tuple[Download, ...] = ()
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


CATALOG: dict[str, CatalogEntry] = {
    "digits": CatalogEntry(digits.digits),
    "cifar10": CatalogEntry(cifar.cifar10, downloads=(cifar.CIFAR10,)),
    "cifar100": CatalogEntry(cifar.cifar100, downloads=(cifar.CIFAR100,)),
    "mnist": CatalogEntry(mnist.mnist, natural=True, downloads=mnist.DOWNLOADS),
    "femnist": CatalogEntry(
        femnist.femnist, natural=True, files=("femnist/train/*.json", "femnist/test/*.json"), address=leaf.ADDRESS
    ),
    "shakespeare": CatalogEntry(  # Gutenberg's text, or LEAF's folders
        shakespeare.shakespeare, natural=True, files=("shakespeare/*",), address=shakespeare.SOURCES
    ),
    "stackoverflow": CatalogEntry(stackoverflow.stackoverflow, natural=True, downloads=stackoverflow.DOWNLOADS),
    "text": CatalogEntry(text.text, natural=True),
    "landmarks": CatalogEntry(
        landmarks.landmarks, natural=True, files=landmarks.LANDMARKS.files, address=landmarks.LANDMARKS.address
    ),
    "inaturalist": CatalogEntry(
        landmarks.inaturalist, natural=True, files=landmarks.INATURALIST.files, address=landmarks.INATURALIST.address
    ),
    "arrays": CatalogEntry(arrays.arrays, natural=True),
    "images": CatalogEntry(images.images, natural=True),
    "table": CatalogEntry(table.table, natural=True),
}


def find(name: str) -> CatalogEntry:
    """Return the entry of the data set of this name.

    Args:
        name: A data set of Keel, an entry point of the group "keel.data", or "module:name" of a CatalogEntry or of a
            loader: a function with keyword-only settings that returns a Dataset.

    Raises:
        KeelError: There is no such data set, it cannot be imported, or it is neither an entry nor a function.
    """
    found: Any = registry.find("data.name", name, CATALOG, ENTRY_POINTS)
    if isinstance(found, CatalogEntry):
        return found
    if not callable(found):
        raise KeelError(
            f"data.name: {name!r} must be a function that returns a keel.Dataset, or a CatalogEntry "
            f"(got {type(found).__name__})"
        )
    try:
        signature(found)
    except (TypeError, ValueError) as error:
        raise KeelError(f"data.name: {name!r} must have a signature that Python can inspect ({error})") from error
    return CatalogEntry(found, natural=None)


def default_scheme(name: object, settings: Mapping[str, Any]) -> PartitionScheme:
    """Return the partitioning scheme of a data set for which neither the spec nor defaults.toml gives one.

    It is "key" for arrays with `keys`, and for a user's data set whose CatalogEntry says that it has natural clients.
    """
    external = isinstance(name, str) and registry.known(name, CATALOG, ENTRY_POINTS) and name not in CATALOG
    natural = "keys" in settings or (external and find(str(name)).natural)
    return "key" if natural else "dirichlet"


def describe(name: str) -> dict[str, Any]:
    """Describe a data set, as `keel data list` prints it."""
    entry = find(name)
    if not entry.needs_files:
        files = "your files" if signature(entry.load).parameters else "embedded"
    elif not entry.missing():
        files = "available"
    else:
        files = "keel data get" if entry.downloads else "copy by hand"
    return {
        "name": name,
        "title": entry.title,
        "files": files,
        "clients": "natural" if entry.natural else "partitioned",
        "needs": [*(d.path for d in entry.downloads), *entry.files],
        "address": entry.address or ", ".join(download.url for download in entry.downloads),
    }


def load(name: str, settings: Mapping[str, Any]) -> Dataset:
    """Load a data set from its files."""
    if not registry.known(name, CATALOG, ENTRY_POINTS):
        raise KeelError(f"data.name = {name!r} requires data passed in Python: keel.run(..., data=...)")
    entry = find(name)
    if missing := entry.missing():
        source = f"run: keel data get {name}" if entry.downloads else f"copy it there from {entry.address}"
        raise KeelError(
            f"data.name: {name!r} requires the file {str(data_folder() / missing[0])!r}, which does not exist; "
            f"{source}, or set KEEL_DATA to another data folder"
        )
    if name in CATALOG:
        return call("data", entry.load, **settings)
    dataset = call_imported("data.name", name, entry.load, **settings)
    if not isinstance(dataset, Dataset):
        raise KeelError(f"data.name: {name!r} must return a keel.Dataset (got {type(dataset).__name__})")
    return dataset
