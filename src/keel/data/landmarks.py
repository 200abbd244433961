"""Landmarks-User-160k and iNaturalist-User-120k (Hsu et al., 2020): photographs by photographer.

The publisher provides tables that map photographs to users; the photographs come from the original data sets.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.images import ImageList, Side, image_dataset, image_files
from keel.data.store import data_folder
from keel.data.table import csv_rows
from keel.errors import KeelError, shown

PLAIN_NAME = re.compile(r"[\w-]{1,200}", re.ASCII)
MAX_DIGITS = 9
"""The digits of the largest label; Python refuses to convert thousands of them."""


@dataclass(frozen=True)
class UserSplit:
    """A published federated split: its files in the data folder, how to find its images, and its published counts."""

    folder: str
    train: str
    images: str
    find: Callable[[Path, set[str]], dict[str, Path]]
    address: str
    users: int
    train_images: int
    test_images: int
    classes: int

    @property
    def files(self) -> tuple[str, ...]:
        """The tables. The images are only needed until they are decoded."""
        return f"{self.folder}/{self.train}", f"{self.folder}/test.csv"


def find_by_name(root: Path, ids: set[str]) -> dict[str, Path]:
    """Find images in the folders of Google's archives (a/b/c/abc....jpg) or all in one folder."""
    paths = {}
    for image in ids:
        if not PLAIN_NAME.fullmatch(image):  # it could name a file outside of the folder
            raise KeelError(f"data: image_id must be letters, digits, '_' and '-' (got {shown(image)})")
        for path in (root / image[:1] / image[1:2] / image[2:3] / f"{image}.jpg", root / f"{image}.jpg"):
            if path.is_file():
                paths[image] = path
                break
    return paths


def find_in_tree(root: Path, ids: set[str]) -> dict[str, Path]:
    """Find images anywhere below the root."""
    return {path.stem: path for path in image_files(root) if path.stem in ids}


LANDMARKS = UserSplit(
    folder="landmarks-user-160k",
    train="federated_train.csv",
    images="images",
    find=find_by_name,
    address=(
        "http://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k.zip (the tables) and "
        "https://github.com/cvdfoundation/google-landmark (the train images, below landmarks-user-160k/images)"
    ),
    users=1_262,
    train_images=164_172,
    test_images=19_526,
    classes=2_028,
)
INATURALIST = UserSplit(
    folder="inaturalist-user-120k",
    train="federated_train_user_120k.csv",
    images="train_val_images",
    find=find_in_tree,
    address=(
        "http://storage.googleapis.com/gresearch/federated-vision-datasets/inaturalist-user-120k.zip (the tables) "
        "and https://ml-inat-competition-datasets.s3.amazonaws.com/2017/train_val_images.tar.gz (the images, as "
        "inaturalist-user-120k/train_val_images)"
    ),
    users=9_275,
    train_images=120_300,
    test_images=35_641,
    classes=1_203,
)


def landmarks(*, size: Side = 224, augment: bool = True) -> Dataset:
    """164,172 photographs of 2,028 landmarks by 1,262 users (Landmarks-User-160k)."""
    return load(LANDMARKS, size, augment)


def inaturalist(*, size: Side = 224, augment: bool = True) -> Dataset:
    """120,300 photographs of 1,203 species by 9,275 users (iNaturalist-User-120k)."""
    return load(INATURALIST, size, augment)


LANDMARKS_ENTRY = CatalogEntry(landmarks, natural=True, files=LANDMARKS.files, address=LANDMARKS.address)
INATURALIST_ENTRY = CatalogEntry(inaturalist, natural=True, files=INATURALIST.files, address=INATURALIST.address)


def load(split: UserSplit, size: int, augment: bool) -> Dataset:
    """Load a split. Once the images are decoded, only the tables are needed."""
    folder = data_folder() / split.folder
    tables = [folder / split.train, folder / "test.csv"]

    def list_images() -> tuple[ImageList, ImageList]:
        users, train_ids, train_labels = _read(tables[0], ("user_id", "image_id", "class"), split.classes)
        test_ids, test_labels = _read(tables[1], ("image_id", "class"), split.classes)
        _check_counts(split, folder, len(set(users)), len(train_ids), len(test_ids))
        paths = _find_all(split, folder / split.images, train_ids + test_ids)
        train = ImageList([paths[image] for image in train_ids], [int(label) for label in train_labels], users)
        test = ImageList([paths[image] for image in test_ids], [int(label) for label in test_labels], [])
        return train, test

    return image_dataset(split.folder, tables, list_images, split.classes, size, augment)


def _read(path: Path, columns: tuple[str, ...], classes: int) -> list[list[str]]:
    """Read some columns of a table, the last of which is the class."""
    rows = csv_rows(path, "data")
    _, header = next(rows, (1, []))
    if not set(columns) <= set(header):
        got = shown(", ".join(header))
        raise KeelError(f"data: {str(path)!r} must have the columns {', '.join(columns)} (got {got})")
    positions = [header.index(column) for column in columns]
    values: list[list[str]] = [[] for _ in columns]
    for line, cells in rows:
        for position, column in zip(positions, values, strict=True):
            column.append(cells[position])
        label = values[-1][-1]
        if not (label.isdecimal() and len(label) <= MAX_DIGITS and int(label) < classes):
            raise KeelError(
                f"data: line {line} of {str(path)!r}: the class must be from 0 to {classes - 1} (got {shown(label)})"
            )
    return values


def _check_counts(split: UserSplit, folder: Path, users: int, train: int, test: int) -> None:
    if (users, train, test) != (split.users, split.train_images, split.test_images):
        raise KeelError(
            f"data: the tables in {str(folder)!r} must be the published ones with {split.users:,} users, "
            f"{split.train_images:,} training images and {split.test_images:,} test images "
            f"(got {users:,}, {train:,} and {test:,})"
        )


def _find_all(split: UserSplit, root: Path, ids: list[str]) -> dict[str, Path]:
    paths = split.find(root, set(ids))
    missing = [image for image in ids if image not in paths]
    if missing:
        raise KeelError(
            f"data: {len(missing):,} of {len(ids):,} images are missing in {str(root)!r}, for example "
            f"'{missing[0]}.jpg'; get them from {split.address}"
        )
    return paths
