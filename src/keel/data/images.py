"""Images in files as examples: decoded once to squares of bytes, never all in memory. And the user's image folder."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from keel.data.federated import Examples, Pool
from keel.data.preparation import Pixels
from keel.data.store import prepared
from keel.errors import KeelError
from keel.settings import PathText

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's photographs, as networks that were trained on it expect them."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
LAYOUT = "FOLDER/train/CLIENT/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE"
BATCH = 32
"""Images that a thread decodes before it says so."""

Side = Annotated[int, Field(ge=1)]


class Listed(NamedTuple):
    """Images that are there, what each shows, and whose it is where that is told."""

    files: list[Path]
    labels: list[int]
    keys: list[str]


def images(*, folder: PathText, size: Side = 32, augment: bool = True) -> Pool:
    """The user's own images: FOLDER/train/CLIENT/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE."""
    train, test = _listed(Path(folder) / "train", 2), _listed(Path(folder) / "test", 1)
    classes = sorted({path.parent.name for path in train})
    if unseen := sorted({path.parent.name for path in test} - set(classes)):
        raise KeelError(
            f"data.folder: {str(Path(folder) / 'test' / unseen[0])!r} is a class that no client in train has; "
            f"accepted: {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
        )
    code = {name: number for number, name in enumerate(classes)}
    parts = (
        Listed(train, [code[path.parent.name] for path in train], [path.parent.parent.name for path in train]),
        Listed(test, [code[path.parent.name] for path in test], []),
    )
    return image_pool("images", [*train, *test], lambda: parts, len(classes), size, augment)


def image_pool(
    name: str,
    sources: Sequence[Path],
    find: Callable[[], tuple[Listed, Listed]],
    classes: int,
    size: int,
    augment: bool,
) -> Pool:
    """Training and test images, which are found and decoded when a source has changed and opened otherwise."""

    def make(place: Path) -> dict[str, Any]:
        train, test = find()
        store_images(place, {"train_inputs": train.files, "test_inputs": test.files}, size)
        np.save(place / "train_targets.npy", np.array(train.labels, dtype=np.int64))
        np.save(place / "test_targets.npy", np.array(test.labels, dtype=np.int64))
        np.save(place / "train_keys.npy", np.array(train.keys))
        return {}

    stored = prepared(name, sources, {"size": size}, make)
    train, test = (
        Examples(*(torch.from_numpy(stored.arrays[f"{part}_{what}"]) for what in ("inputs", "targets")))
        for part in ("train", "test")
    )
    pixels = Pixels(MEAN, STD, size // 8 * augment)
    return Pool(train, test, classes, keys=stored.arrays["train_keys"], prepare=pixels, sha256=stored.sha256)


def store_images(place: Path, parts: dict[str, list[Path]], size: int) -> None:
    """NAME.npy of (images, 3, size, size) bytes for each part, written as the images are decoded."""
    from rich.progress import track

    from keel.terminal import errors  # not above: the terminal knows the rounds, and they the data

    try:
        import PIL  # noqa: F401
    except ImportError:
        raise KeelError("data: images need Pillow; accepted: pip install 'keel-fl[vision]'") from None
    _check_room(place, sum(map(len, parts.values())), size)
    jobs = []
    for name, files in parts.items():
        shape = (len(files), 3, size, size)
        array = np.lib.format.open_memmap(place / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
        jobs += [(array[at : at + BATCH], files[at : at + BATCH]) for at in range(0, len(files), BATCH)]

    def do(job: tuple[np.ndarray, list[Path]]) -> None:
        target, files = job
        for i, file in enumerate(files):
            target[i] = decode(file, size)

    with ThreadPoolExecutor() as threads:  # Pillow decodes outside of the interpreter's lock
        done = threads.map(do, jobs)
        bar = track(
            done, "images", len(jobs), console=errors, transient=True, disable=not errors.is_terminal, show_speed=False
        )
        for _ in bar:
            pass


def decode(path: Path, size: int) -> np.ndarray:
    """The middle square of an image as (3, size, size) bytes: red, green, blue."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # more than a byte for each pixel, which Pillow would cut off at white
                raise KeelError(f"data: {str(path)!r} has pixels of more than 8 bits; accepted: 8 bits for a colour")
            image.draft("RGB", (size, size))  # a JPEG is decoded at half, a quarter or an eighth if that will do
            colours = image.convert("RGBA") if "transparency" in image.info else image
            square = ImageOps.fit(colours.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except KeelError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise KeelError(f"data: {str(path)!r} is damaged or no image ({error}); accepted: a whole image") from error
    return np.asarray(square).transpose(2, 0, 1)


def image_files(root: Path) -> Iterator[Path]:
    """The images below a folder, in a fixed order; what is hidden is left alone."""

    def refuse(error: OSError) -> None:
        raise KeelError(f"data: {error.filename!r} cannot be read ({error.strerror})") from error

    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield Path(folder, name)


def _listed(root: Path, folders: int) -> list[Path]:
    """The images so many folders below the root, and none elsewhere."""
    if not root.is_dir():
        raise KeelError(f"data.folder: no folder {str(root)!r}; accepted: {LAYOUT}")
    files = list(image_files(root))
    if not files:
        raise KeelError(f"data.folder: no images in {str(root)!r}; accepted: {LAYOUT}, as {', '.join(SUFFIXES)}")
    for path in files:
        if len(path.relative_to(root).parts) != folders + 1:
            raise KeelError(f"data.folder: {str(path)!r} is out of place; accepted: {LAYOUT}")
    return files


def _check_room(place: Path, number: int, size: int) -> None:
    needed, free = number * 3 * size * size, disk_usage(place).free
    if needed > free:
        raise KeelError(
            f"data: preparing {number:,} images of {size}x{size} needs {needed / 1e9:.1f} GB in {str(place.parent)!r}, "
            f"{free / 1e9:.1f} GB are free; accepted: more room, KEEL_DATA elsewhere, or a smaller data.size"
        )
