"""The data sets by name: how each is loaded, which files it needs and where they come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

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
from keel.data.federated import Pool
from keel.data.fetch import Download
from keel.data.store import data_folder
from keel.errors import KeelError, unknown
from keel.settings import call


@dataclass(frozen=True)
class DataSet:
    """A data set and its files: `downloads` that Keel fetches, or `files` that the user brings from `address`.

    A set that is neither is the user's own, or embedded; `natural` if a key tells who holds what.
    """

    load: Callable[..., Pool]
    natural: bool = False
    downloads: tuple[Download, ...] = ()
    files: tuple[str, ...] = ()
    address: str = ""

    @property
    def files_of_its_own(self) -> bool:
        return bool(self.downloads or self.files)

    @property
    def title(self) -> str:
        return (self.load.__doc__ or "").splitlines()[0]

    def missing(self) -> list[str]:
        """The files that are not in the data folder. A name may be a pattern."""
        folder = data_folder()
        fetched = [name for download in self.downloads for name in download.missing(folder)]
        return fetched + [name for name in self.files if not any(folder.glob(name))]


CATALOG: dict[str, DataSet] = {
    "digits": DataSet(digits.digits),
    "cifar10": DataSet(cifar.cifar10, downloads=(cifar.CIFAR10,)),
    "cifar100": DataSet(cifar.cifar100, downloads=(cifar.CIFAR100,)),
    "mnist": DataSet(mnist.mnist, natural=True, downloads=mnist.DOWNLOADS),
    "femnist": DataSet(
        femnist.femnist, natural=True, files=("femnist/train/*.json", "femnist/test/*.json"), address=leaf.ADDRESS
    ),
    "shakespeare": DataSet(  # one text, or LEAF's folders
        shakespeare.shakespeare, natural=True, files=("shakespeare/*",), address=shakespeare.HOW
    ),
    "stackoverflow": DataSet(stackoverflow.stackoverflow, natural=True, downloads=stackoverflow.DOWNLOADS),
    "text": DataSet(text.text, natural=True),
    "landmarks": DataSet(
        landmarks.landmarks, natural=True, files=landmarks.LANDMARKS.files, address=landmarks.LANDMARKS.address
    ),
    "inaturalist": DataSet(
        landmarks.inaturalist, natural=True, files=landmarks.INATURALIST.files, address=landmarks.INATURALIST.address
    ),
    "arrays": DataSet(arrays.arrays, natural=True),
    "images": DataSet(images.images, natural=True),
    "table": DataSet(table.table, natural=True),
}


def find(name: str) -> DataSet:
    if name not in CATALOG:
        raise unknown("data.name", name, CATALOG)
    return CATALOG[name]


def describe(name: str) -> dict[str, Any]:
    """A data set as `keel data list` shows it."""
    entry = CATALOG[name]
    if not entry.files_of_its_own:
        files = "embedded" if not signature(entry.load).parameters else "your own"
    elif not entry.missing():
        files = "there"
    else:
        files = "keel data get" if entry.downloads else "to bring"
    return {
        "name": name,
        "title": entry.title,
        "files": files,
        "clients": "natural" if entry.natural else "dealt",
        "needs": [*(d.path for d in entry.downloads), *entry.files],
        "address": entry.address or ", ".join(download.url for download in entry.downloads),
    }


def load(name: str, settings: Mapping[str, Any]) -> Pool:
    """A data set's examples, from its files."""
    if name not in CATALOG:
        raise KeelError(f"data.name: {name!r} stands for data passed in Python: keel.run(..., data=...)")
    entry = CATALOG[name]
    if missing := entry.missing():
        source = f"keel data get {name}" if entry.downloads else entry.address
        raise KeelError(
            f"data.name: {name!r} needs {str(data_folder() / missing[0])!r}, which is not there; accepted: {source}, "
            "or another data folder in KEEL_DATA"
        )
    return call("data", entry.load, **settings)
