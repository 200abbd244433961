"""The data sets by name, and the data sets that users bring as "module:name" or in an installed package."""

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from keel import registry
from keel.data.catalog_entry import CatalogEntry
from keel.data.schemes import PartitionScheme
from keel.data.store import data_folder
from keel.errors import KeelError
from keel.settings import call, call_imported

if TYPE_CHECKING:
    from keel.data.dataset import Dataset

ENTRY_POINTS = "keel.data"
CATALOG: Mapping[str, CatalogEntry] = registry.Lazy(
    {
        "digits": "keel.data.digits:ENTRY",
        "cifar10": "keel.data.cifar:CIFAR10_ENTRY",
        "cifar100": "keel.data.cifar:CIFAR100_ENTRY",
        "mnist": "keel.data.mnist:ENTRY",
        "femnist": "keel.data.femnist:ENTRY",
        "shakespeare": "keel.data.shakespeare:ENTRY",
        "stackoverflow": "keel.data.stackoverflow:ENTRY",
        "text": "keel.data.text:ENTRY",
        "landmarks": "keel.data.landmarks:LANDMARKS_ENTRY",
        "inaturalist": "keel.data.landmarks:INATURALIST_ENTRY",
        "arrays": "keel.data.arrays:ENTRY",
        "images": "keel.data.images:ENTRY",
        "table": "keel.data.table:ENTRY",
    }
)


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


def load(name: str, settings: Mapping[str, Any]) -> "Dataset":
    """Load a data set from its files."""
    from keel.data.dataset import Dataset

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


__all__ = ["CATALOG", "ENTRY_POINTS", "CatalogEntry", "default_scheme", "describe", "find", "load"]
