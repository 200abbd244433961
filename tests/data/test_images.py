"""A user's image folder, and the decoding of images to squares of bytes."""

import os
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import keel
from keel import KeelError
from keel.data import images
from keel.data.transforms import Pixels

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")

RED, GREEN, BLUE = (200, 20, 30), (20, 180, 40), (30, 40, 220)


def plain(colour: tuple[int, int, int], width: int = 24, height: int = 16) -> "Image.Image":
    return Image.new("RGB", (width, height), colour)


def put(image: "Image.Image", path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clients, one of them with a single class."""
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "data"))
    root = tmp_path / "pictures"
    put(plain(RED), root / "train/ann/cats/1.jpg")
    put(plain(RED), root / "train/ann/cats/2.JPEG")
    put(plain(GREEN), root / "train/ann/dogs/1.png")
    put(plain(BLUE), root / "train/bob/dogs/1.webp")
    put(plain(GREEN), root / "test/dogs/1.bmp")
    put(plain(RED), root / "test/cats/1.png")
    (root / "train/bob/dogs/notes.txt").write_text("not an image")
    (root / "train/bob/dogs/.hidden.png").write_text("not an image")
    put(plain(RED), root / "train/.thumbnails/cats/1.png")
    return root


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_clients_classes_and_images_are_read_from_the_folders(folder: Path) -> None:
    dataset = images.images(folder=str(folder), size=8)
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["ann", "ann", "ann", "bob"]
    assert (dataset.classes, len(dataset.class_names)) == (2, 2)
    assert {path.name for path in (folder / "test").iterdir()} == set(dataset.class_names)
    assert dataset.train.targets.tolist() == [0, 0, 1, 1]
    assert dataset.test.targets.tolist() == [0, 1]
    assert dataset.train.inputs.shape == (4, 3, 8, 8)
    colours = dataset.train.inputs.float().mean((2, 3)).numpy()
    np.testing.assert_allclose(colours, [RED, RED, GREEN, BLUE], atol=4)
    np.testing.assert_allclose(dataset.test.inputs.float().mean((2, 3)).numpy(), [RED, GREEN], atol=0)


def test_images_are_augmented_unless_disabled(folder: Path) -> None:
    assert images.images(folder=str(folder), size=16).transform == Pixels(images.MEAN, images.STD, 2)
    assert images.images(folder=str(folder), size=16, augment=False).transform == Pixels(images.MEAN, images.STD, 0)


@pytest.mark.parametrize("name", ["grey.jpg", "grey.png", "cmyk.jpg", "rgba.png", "palette.png", "bits.png"])
def test_every_image_mode_is_converted_to_rgb(name: str, tmp_path: Path) -> None:
    mode = {"grey": "L", "cmyk": "CMYK", "rgba": "RGBA", "palette": "P", "bits": "1"}[name.split(".")[0]]
    image = plain((255, 255, 255)).convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(256)
    decoded = images.decode(put(image, tmp_path / name), 8)
    assert decoded.shape == (3, 8, 8)
    assert decoded.min() >= 250


def test_the_centre_square_is_cropped(tmp_path: Path) -> None:
    wide = plain(RED, 30, 10)
    wide.paste(plain(GREEN, 10, 10), (10, 0))
    tall = wide.rotate(90, expand=True)
    for image in wide, tall:
        decoded = images.decode(put(image, tmp_path / "image.png"), 10)
        assert (decoded == np.array(GREEN)[:, None, None]).all()


def test_a_large_jpeg_is_decoded_at_reduced_size_with_the_same_result(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 255, 640, dtype=np.uint8), (480, 1))
    path = put(Image.fromarray(np.stack([ramp, ramp[:, ::-1], ramp], -1)), tmp_path / "ramp.jpg")
    lossless = put(Image.open(path), tmp_path / "ramp.png")
    decoded = images.decode(path, 32).astype(float)
    np.testing.assert_allclose(decoded, images.decode(lossless, 32), atol=4)
    assert (np.diff(decoded[0], axis=1) > 0).all()  # red grows to the right, green to the left
    assert (np.diff(decoded[1], axis=1) < 0).all()


def test_a_damaged_image_is_refused_and_leaves_no_prepared_files(folder: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    damage(put(Image.fromarray(noise), folder / "train/bob/cats/half.jpg"))
    with pytest.raises(KeelError, match=r"data: '.*train/bob/cats/half.jpg' is damaged or not an image \(.*truncated"):
        images.images(folder=str(folder))
    assert [path for path in (tmp_path / "data/prepared").iterdir() if path.is_dir()] == []


def test_a_file_that_is_not_an_image_is_refused(folder: Path) -> None:
    (folder / "test/cats/text.png").write_text("not an image")
    with pytest.raises(KeelError, match=r"test/cats/text.png' is damaged or not an image"):
        images.images(folder=str(folder))


def test_images_with_16_bits_per_channel_are_refused(tmp_path: Path) -> None:
    path = put(Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)), tmp_path / "xray.png")
    with pytest.raises(KeelError, match=r"xray.png' must have 8 bits per channel \(got mode I;16"):
        images.decode(path, 8)


def test_images_are_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = images.images(folder=str(folder), size=8)
    monkeypatch.setattr(images, "decode", None)
    second = images.images(folder=str(folder), size=8)
    assert first.sha256 == second.sha256


def test_a_changed_image_is_decoded_again(folder: Path) -> None:
    first = images.images(folder=str(folder), size=8)
    put(plain(BLUE), folder / "test/cats/1.png")
    os.utime(folder / "test/cats/1.png", (0, 0))
    second = images.images(folder=str(folder), size=8)
    assert first.sha256 != second.sha256
    assert second.test.inputs[0, :, 0, 0].tolist() == list(BLUE)


def test_a_wrong_folder_layout_is_refused(folder: Path) -> None:
    put(plain(RED), folder / "test/birds/1.png")
    with pytest.raises(KeelError, match=r"test/birds' must be a class of the training images: cats, dogs$"):
        images.images(folder=str(folder))
    (folder / "test/birds/1.png").rename(folder / "test/1.png")
    with pytest.raises(
        KeelError, match=r"data.folder: '.*test/1.png' is in the wrong folder; the layout is FOLDER/train/CLIENT"
    ):
        images.images(folder=str(folder))
    (folder / "test").rename(folder / "held-out")
    with pytest.raises(
        KeelError, match=r"data.folder: folder '.*test' does not exist; the layout is FOLDER/train/CLIENT/CLASS"
    ):
        images.images(folder=str(folder))
    (folder / "test/cats").mkdir(parents=True)
    with pytest.raises(KeelError, match=r"data.folder: '.*test' has no images"):
        images.images(folder=str(folder))


def test_too_little_disk_space_is_reported_before_decoding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "disk_usage", lambda place: namedtuple("Usage", "free")(10**9))
    with pytest.raises(
        KeelError,
        match=r"6 images of 9000x9000 require 1.5 GB in '.*prepared', where 1.0 GB are free; free some",
    ):
        images.images(folder=str(folder), size=9000)


def test_without_pillow_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(KeelError, match=r"pip install 'keel-fl\[vision\]'"):
        images.images(folder=str(folder))


def test_a_spec_can_train_on_an_image_folder(folder: Path, tmp_path: Path) -> None:
    table = {
        "rounds": 1,
        "algorithm": {"name": "fedavg"},
        "data": {"name": "images", "folder": str(folder), "size": 8, "partition": "key"},
        "model": {"name": "mlp"},
        "participation": {"rate": 1.0},
    }
    run = keel.run(table, out=tmp_path / "run")
    assert run.status == "finished"
    with pytest.raises(KeelError, match=r"data.size must be greater than or equal to 1 .got 0"):
        keel.run({**table, "data": {**table["data"], "size": 0}}, out=tmp_path / "other")
