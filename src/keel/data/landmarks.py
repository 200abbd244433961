"""Landmarks-User-160k and iNaturalist-User-120k (Hsu et al., 2020): photographs by who took them.

The publisher gives tables of who took which photograph; the photographs come from where they always were.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keel.data.federated import Pool
from keel.data.images import Listed, Side, image_files, image_pool
from keel.data.store import data_folder
from keel.data.table import csv_rows
from keel.errors import KeelError


@dataclass(frozen=True)
class UserSplit:
    """A published split: its files in the data folder, how its images are found, and how many there are of all."""

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
        """The tables. The images are looked for when they are decoded, and may go after that."""
        return f"{self.folder}/{self.train}", f"{self.folder}/test.csv"


def find_by_name(root: Path, ids: set[str]) -> dict[str, Path]:
    """Images as Google's archives hold them, a/b/c/abc....jpg, or all in one folder."""
    found = {}
    for image in ids:
        for path in (root / image[:1] / image[1:2] / image[2:3] / f"{image}.jpg", root / f"{image}.jpg"):
            if path.is_file():
                found[image] = path
                break
    return found


def find_in_tree(root: Path, ids: set[str]) -> dict[str, Path]:
    """Images in folders that their names do not tell."""
    return {path.stem: path for path in image_files(root) if path.stem in ids}


LANDMARKS = UserSplit(
    folder="landmarks-user-160k",
    train="federated_train.csv",
    images="images",
    find=find_by_name,
    address=(
        "http://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k.zip (who took what) and "
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
        "http://storage.googleapis.com/gresearch/federated-vision-datasets/inaturalist-user-120k.zip (who took what) "
        "and https://ml-inat-competition-datasets.s3.amazonaws.com/2017/train_val_images.tar.gz (the images, as "
        "inaturalist-user-120k/train_val_images)"
    ),
    users=9_275,
    train_images=120_300,
    test_images=35_641,
    classes=1_203,
)


def landmarks(*, size: Side = 224, augment: bool = True) -> Pool:
    """164,172 photographs of 2,028 landmarks by 1,262 people (Landmarks-User-160k)."""
    return load(LANDMARKS, size, augment)


def inaturalist(*, size: Side = 224, augment: bool = True) -> Pool:
    """120,300 photographs of 1,203 species by 9,275 people (iNaturalist-User-120k)."""
    return load(INATURALIST, size, augment)


def load(split: UserSplit, size: int, augment: bool) -> Pool:
    """The images are looked for when they are decoded and not again, so that they need not stay."""
    folder = data_folder() / split.folder
    tables = [folder / split.train, folder / "test.csv"]

    def find() -> tuple[Listed, Listed]:
        users, train_ids, train_labels = _read(tables[0], ("user_id", "image_id", "class"), split.classes)
        test_ids, test_labels = _read(tables[1], ("image_id", "class"), split.classes)
        _check_counts(split, folder, len(set(users)), len(train_ids), len(test_ids))
        paths = _find_all(split, folder / split.images, train_ids + test_ids)
        train = Listed([paths[image] for image in train_ids], [int(label) for label in train_labels], users)
        test = Listed([paths[image] for image in test_ids], [int(label) for label in test_labels], [])
        return train, test

    return image_pool(split.folder, tables, find, split.classes, size, augment)


def _read(path: Path, columns: tuple[str, ...], classes: int) -> list[list[str]]:
    """The columns of a table, the last of which is the class."""
    rows = csv_rows(path, "data")
    _, header = next(rows, (1, []))
    if not set(columns) <= set(header):
        raise KeelError(f"data: {str(path)!r} has the columns {', '.join(header)}; accepted: {', '.join(columns)}")
    places = [header.index(column) for column in columns]
    values: list[list[str]] = [[] for _ in columns]
    for line, cells in rows:
        for place, column in zip(places, values, strict=True):
            column.append(cells[place])
        label = values[-1][-1]
        if not (label.isdecimal() and int(label) < classes):
            raise KeelError(f"data: {str(path)!r} line {line}: class {label!r}; accepted: 0 to {classes - 1}")
    return values


def _check_counts(split: UserSplit, folder: Path, users: int, train: int, test: int) -> None:
    if (users, train, test) != (split.users, split.train_images, split.test_images):
        raise KeelError(
            f"data: the tables in {str(folder)!r} tell of {users:,} users with {train:,} images, and {test:,} to test; "
            f"accepted: the published ones, {split.users:,} with {split.train_images:,}, and {split.test_images:,}"
        )


def _find_all(split: UserSplit, root: Path, ids: list[str]) -> dict[str, Path]:
    found = split.find(root, set(ids))
    missing = [image for image in ids if image not in found]
    if missing:
        raise KeelError(
            f"data: {len(missing):,} of {len(ids):,} images are not in {str(root)!r}, first '{missing[0]}.jpg'; "
            f"accepted: all of them, from {split.address}"
        )
    return found
