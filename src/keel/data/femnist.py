"""FEMNIST (Caldas et al., 2019): handwritten digits and letters by writer, from LEAF's JSON files."""

from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np

from keel.data import leaf
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.transforms import Pixels
from keel.errors import KeelError, shown

CHARACTERS = digits + ascii_uppercase + ascii_lowercase
CLASSES = len(CHARACTERS)
PIXELS = 28 * 28
# Measured on the 14,708 training images of a sample of LEAF's (105 writers); white is 1.
MEAN, STD = 0.9612, 0.1656


def femnist() -> Dataset:
    """Handwritten digits and letters of 28x28 pixels in 62 classes; complete, about 800,000 images by 3,550 writers."""
    return replace(leaf.load("femnist", images, CLASSES, Pixels((MEAN,), (STD,))), class_names=tuple(CHARACTERS))


ENTRY = CatalogEntry(femnist, natural=True, files=("femnist/train/*.json", "femnist/test/*.json"), address=leaf.ADDRESS)


def images(x: list[Any], y: list[Any], file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Convert a writer's images to bytes, without loss because LEAF stores bytes divided by 255, and its labels."""
    try:
        greys, labels = np.array(x, dtype=np.float64), np.array(y)
    except (TypeError, ValueError, OverflowError) as error:
        raise KeelError(
            f"data: {str(file)!r} must have {PIXELS} numbers per image and a label (got other values: {error})"
        ) from error
    if greys.shape != (len(y), PIXELS):
        raise KeelError(f"data: {str(file)!r} must have {PIXELS} numbers per image (got shape {greys.shape})")
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values are refused below
        bytes_ = np.rint(greys * 255)
        valid = (np.abs(greys - bytes_ / 255) < 1e-6) & (bytes_ >= 0) & (bytes_ <= 255)
    if not valid.all():
        raise KeelError(
            f"data: {str(file)!r} must have pixels k/255 for whole k from 0 to 255 (got {float(greys[~valid][0])})"
        )
    if labels.dtype.kind != "i" or labels.shape != (len(y),) or labels.min() < 0 or labels.max() >= CLASSES:
        wrong = next((label for label in y if not (isinstance(label, int) and 0 <= label < CLASSES)), y[0])
        raise KeelError(f"data: {str(file)!r} must have labels from 0 to {CLASSES - 1} (got {shown(wrong)})")
    return bytes_.astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.uint8)
