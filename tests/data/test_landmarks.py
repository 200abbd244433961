"""Landmarks-User-160k and iNaturalist-User-120k, from small files in the publishers' format."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keel import KeelError
from keel.data import catalog, images, landmarks
from keel.data.landmarks import INATURALIST, LANDMARKS, UserSplit, load
from keel.data.store import data_folder

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")

TRAIN = [("7", "0a1b2c3d4e5f6071", 3), ("7", "f00dfeedcafe0001", 0), ("12", "0a1fffffffffffff", 3)]
TEST = [("abcdef0123456789", 1), ("1234567890abcdef", 3)]


def write(path: Path, header: str, rows: list[tuple[object, ...]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def photograph(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), (grey, grey, grey)).save(path)


def tree(image: str) -> str:
    return f"{image[0]}/{image[1]}/{image[2]}/{image}.jpg"


def flat(image: str) -> str:
    return f"{image}.jpg"


def species(image: str) -> str:
    return f"Plantae/Yucca schidigera/{image}.jpg" if image < "a" else f"Aves/Ardea alba/{image}.jpg"


SMALL = {"users": 2, "train_images": 3, "test_images": 2, "classes": 4}
SMALL_LANDMARKS, SMALL_INATURALIST = replace(LANDMARKS, **SMALL), replace(INATURALIST, **SMALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    write(tmp_path / "landmarks-user-160k/federated_train.csv", "user_id,image_id,class", TRAIN)
    write(tmp_path / "landmarks-user-160k/test.csv", "image_id,class", TEST)
    labelled = [(*row, 4000 + number) for number, row in enumerate(TRAIN)]
    write(tmp_path / "inaturalist-user-120k/federated_train_user_120k.csv", "user_id,image_id,class,label", labelled)
    write(tmp_path / "inaturalist-user-120k/test.csv", "image_id,class,label", [(*row, 1) for row in TEST])
    return tmp_path


def photographs(root: Path, place: Callable[[str], str]) -> None:
    for number, image in enumerate([*(row[1] for row in TRAIN), *(row[0] for row in TEST)]):
        photograph(root / place(image), 40 * number)


@pytest.mark.parametrize(
    ("split", "place"),
    [(SMALL_LANDMARKS, tree), (SMALL_LANDMARKS, flat), (SMALL_INATURALIST, species)],
    ids=["landmarks in a tree", "landmarks in one folder", "inaturalist"],
)
def test_photographs_are_read_with_their_users_and_classes(
    split: UserSplit, place: Callable[[str], str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs(folder / split.folder / split.images, place)
    dataset = load(split, 16, True)
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["7", "7", "12"]
    assert dataset.train.targets.tolist() == [3, 0, 3]
    assert dataset.test.targets.tolist() == [1, 3]
    assert dataset.classes == 4
    assert dataset.train.inputs.shape == (3, 3, 16, 16)
    np.testing.assert_allclose(dataset.train.inputs[:, 0, 8, 8], [0, 40, 80], atol=2)
    np.testing.assert_allclose(dataset.test.inputs[:, 0, 8, 8], [120, 160], atol=2)
    monkeypatch.setattr(images, "decode", None)  # they are not decoded again
    assert load(split, 16, True).sha256 == dataset.sha256


def test_the_error_for_missing_photographs_counts_them_and_names_one(folder: Path) -> None:
    root = folder / "landmarks-user-160k/images"
    photographs(root, tree)
    for image in TRAIN[1][1], TEST[0][0]:
        (root / tree(image)).unlink()
    with pytest.raises(
        KeelError,
        match=r"data: 2 of 5 images are missing in '.*images', for example 'f00dfeedcafe0001.jpg'; get them from",
    ):
        load(SMALL_LANDMARKS, 16, True)


@pytest.mark.parametrize("name", ["landmarks", "inaturalist"])
def test_tables_other_than_the_published_ones_are_refused(name: str, folder: Path) -> None:
    split = {"landmarks": LANDMARKS, "inaturalist": INATURALIST}[name]
    photographs(folder / split.folder / split.images, species)
    with pytest.raises(
        KeelError, match=rf"must be the published ones with {split.users:,} users, .* \(got 2, 3 and 2\)"
    ):
        catalog.load(name, {})


def test_wrong_columns_and_classes_are_refused(folder: Path) -> None:
    write(folder / "landmarks-user-160k/test.csv", "image_id,class", [("0a1b2c3d4e5f6071", 4)])
    with pytest.raises(KeelError, match=r"line 2 of '.*test.csv': the class must be from 0 to 3 \(got '4'\)"):
        load(SMALL_LANDMARKS, 16, True)
    write(folder / "landmarks-user-160k/test.csv", "id,landmark_id", [])
    with pytest.raises(KeelError, match=r"test.csv' must have the columns image_id, class \(got 'id, landmark_id'\)"):
        load(SMALL_LANDMARKS, 16, True)


def test_the_error_for_missing_files_names_their_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    with pytest.raises(
        KeelError, match=r"requires the file '.*federated_train.csv', .*landmarks-user-160k.zip .*google-landmark"
    ):
        catalog.load("landmarks", {})
    with pytest.raises(
        KeelError, match=r"requires the file '.*federated_train_user_120k.csv', .*train_val_images.tar.gz"
    ):
        catalog.load("inaturalist", {})


def test_the_published_test_table_of_landmarks_is_read_completely() -> None:
    table = data_folder() / LANDMARKS.folder / "test.csv"
    if not table.is_file():
        pytest.skip("the published table is not in the data folder (KEEL_DATA)")
    ids, labels = landmarks._read(table, ("image_id", "class"), LANDMARKS.classes)
    assert len(set(ids)) == len(labels) == LANDMARKS.test_images
    assert (min(map(int, labels)), max(map(int, labels))) == (0, 2027)
