"""A user's folder of images, and the decoding of image files to squares of bytes, once and never all in memory."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from keel.core.examples import Examples
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.store import prepared
from keel.data.transforms import Pixels
from keel.errors import KeelError
from keel.settings import PathText

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""The channel statistics of ImageNet, which pretrained networks expect."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
"""What an image file may contain, whatever its suffix: Pillow runs other programs for some formats."""
MAX_PIXELS = 1 << 26
"""The largest number of pixels of an image. A small file may declare gigabytes."""
MAX_VISITS = 1000
"""How often a folder is visited through links. Links may form cycles."""
LAYOUT = "FOLDER/train/CLIENT/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE"
BATCH = 32
"""The images that a thread decodes between two updates of the progress bar."""

Side = Annotated[int, Field(ge=1)]


class ImageList(NamedTuple):
    """Image files, their labels, and their clients if they are natural (otherwise no keys)."""

    files: list[Path]
    labels: list[int]
    keys: list[str]


def images(*, folder: PathText, size: Side = 32, augment: bool = True) -> Dataset:
    """Your images: FOLDER/train/CLIENT/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE."""
    train, test = _files_at_depth(Path(folder) / "train", 2), _files_at_depth(Path(folder) / "test", 1)
    classes = sorted({path.parent.name for path in train})
    if only_in_test := sorted({path.parent.name for path in test} - set(classes)):
        raise KeelError(
            f"data.folder: {str(Path(folder) / 'test' / only_in_test[0])!r} must be a class of the training images: "
            f"{', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
        )
    code = {name: number for number, name in enumerate(classes)}
    parts = (
        ImageList(train, [code[path.parent.name] for path in train], [path.parent.parent.name for path in train]),
        ImageList(test, [code[path.parent.name] for path in test], []),
    )
    dataset = image_dataset("images", [*train, *test], lambda: parts, len(classes), size, augment)
    return replace(dataset, class_names=tuple(classes))


ENTRY = CatalogEntry(images, natural=True)


def image_dataset(
    name: str,
    sources: Sequence[Path],
    list_images: Callable[[], tuple[ImageList, ImageList]],
    classes: int,
    size: int,
    augment: bool,
) -> Dataset:
    """Make a data set of images; they are listed and decoded only if a source file has changed since the last time."""

    def make(folder: Path) -> dict[str, Any]:
        train, test = list_images()
        store_images(folder, {"train_inputs": train.files, "test_inputs": test.files}, size)
        np.save(folder / "train_targets.npy", np.array(train.labels, dtype=np.int64))
        np.save(folder / "test_targets.npy", np.array(test.labels, dtype=np.int64))
        np.save(folder / "train_keys.npy", np.array(train.keys))
        return {}

    stored = prepared(name, sources, {"size": size}, make)
    train, test = (
        Examples(*(torch.from_numpy(stored.arrays[f"{part}_{what}"]) for what in ("inputs", "targets")))
        for part in ("train", "test")
    )
    pixels = Pixels(MEAN, STD, size // 8 * augment)
    return Dataset(train, test, classes, keys=stored.arrays["train_keys"], transform=pixels, sha256=stored.sha256)


def store_images(folder: Path, parts: dict[str, list[Path]], size: int) -> None:
    """Decode the images of each part to NAME.npy: bytes of shape (images, 3, size, size), written image by image."""
    from rich.console import Console
    from rich.progress import track

    try:
        from PIL import Image
    except ImportError:
        raise KeelError("data: images require Pillow: pip install 'keel-fl[vision]'") from None
    _check_disk_space(folder, sum(map(len, parts.values())), size)
    jobs = []
    for name, files in parts.items():
        shape = (len(files), 3, size, size)
        array = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
        jobs += [(array[i : i + BATCH], files[i : i + BATCH]) for i in range(0, len(files), BATCH)]

    def decode_batch(job: tuple[np.ndarray, list[Path]]) -> None:
        target, files = job
        for i, file in enumerate(files):
            target[i] = decode(file, size)

    # Pillow releases the interpreter lock while it decodes.
    with ThreadPoolExecutor() as threads, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `decode` has its own limit
        done = threads.map(decode_batch, jobs)
        terminal = Console(stderr=True, highlight=False, markup=False)
        bar = track(
            done,
            "decoding images",
            len(jobs),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
            show_speed=False,
        )
        for _ in bar:
            pass


def decode(path: Path, size: int) -> np.ndarray:
    """Decode the centre square of an image to (3, size, size) bytes: red, green, blue."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.mode[0] in "IF":  # 16 or 32 bits per pixel, which Pillow would clip at 255
                raise KeelError(f"data: {str(path)!r} must have 8 bits per channel (got mode {image.mode})")
            width, height = image.size
            image.draft("RGB", (size, size))  # decode a JPEG at 1/2, 1/4 or 1/8 if that is large enough
            if prod((width, height) if image.info.get("progressive") else image.size) > MAX_PIXELS:
                raise KeelError(f"data: {str(path)!r} must have at most {MAX_PIXELS:,} pixels (got {width}x{height})")
            colours = image.convert("RGBA") if "transparency" in image.info else image
            square = ImageOps.fit(colours.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except KeelError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise KeelError(f"data: {str(path)!r} is damaged or not an image ({error}); replace or delete it") from error
    return np.asarray(square).transpose(2, 0, 1)


def image_files(root: Path) -> Iterator[Path]:
    """Yield the image files below a folder in a fixed order, without hidden files and folders."""

    def refuse(error: OSError) -> None:
        raise KeelError(f"data: {error.filename!r} cannot be read ({error.strerror})") from error

    visits: Counter[tuple[int, int]] = Counter()
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        status = Path(folder).stat()
        visits[status.st_dev, status.st_ino] += 1
        if visits[status.st_dev, status.st_ino] > MAX_VISITS:
            raise KeelError(f"data: {folder!r} is linked more than {MAX_VISITS:,} times; remove links to folders above")
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                path = Path(folder, name)
                if not path.is_file():  # a pipe would block
                    raise KeelError(f"data: {str(path)!r} is not a file; delete it")
                yield path


def _files_at_depth(root: Path, folders: int) -> list[Path]:
    """Return the images below the root, which must all be `folders` folders deep."""
    if not root.is_dir():
        raise KeelError(f"data.folder: folder {str(root)!r} does not exist; the layout is {LAYOUT}")
    files = list(image_files(root))
    if not files:
        raise KeelError(f"data.folder: {str(root)!r} has no images ({', '.join(SUFFIXES)}); the layout is {LAYOUT}")
    for path in files:
        if len(path.relative_to(root).parts) != folders + 1:
            raise KeelError(f"data.folder: {str(path)!r} is in the wrong folder; the layout is {LAYOUT}")
    return files


def _check_disk_space(folder: Path, images: int, size: int) -> None:
    needed, free = images * 3 * size * size, disk_usage(folder).free
    if needed > free:
        raise KeelError(
            f"data: {images:,} images of {size}x{size} require {needed / 1e9:.1f} GB in {str(folder.parent)!r}, where "
            f"{free / 1e9:.1f} GB are free; free some, set KEEL_DATA to another disk, or use a smaller data.size"
        )
