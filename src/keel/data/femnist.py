"""FEMNIST (Caldas et al., 2019): handwritten digits and letters by writer, from LEAF's json."""

from pathlib import Path
from typing import Any

import numpy as np

from keel.data import leaf
from keel.data.federated import Pool
from keel.data.preparation import Pixels
from keel.errors import KeelError

CLASSES = 62
PIXELS = 28 * 28
# Measured on the 14,708 training images of a LEAF sample (105 writers); white paper is 1.
MEAN, STD = 0.9612, 0.1656


def femnist() -> Pool:
    """Handwritten digits and letters of 28x28 in 62 classes; in full, some 3,550 writers and 800,000 images."""
    return leaf.load("femnist", images, CLASSES, Pixels((MEAN,), (STD,)))


def images(x: list[Any], y: list[Any], file: Path) -> tuple[np.ndarray, np.ndarray]:
    """A writer's images as bytes and labels; LEAF's greys are the bytes divided by 255, so nothing is lost."""
    try:
        greys, labels = np.array(x, dtype=np.float64), np.array(y)
    except (TypeError, ValueError) as error:
        raise KeelError(
            f"data: {str(file)!r} holds something else than numbers; accepted: {PIXELS} an image"
        ) from error
    if greys.shape != (len(y), PIXELS):
        raise KeelError(f"data: {str(file)!r} has images of another size; accepted: {PIXELS} numbers each")
    bytes_ = np.rint(greys * 255)
    if not ((np.abs(greys - bytes_ / 255) < 1e-6) & (bytes_ >= 0) & (bytes_ <= 255)).all():
        raise KeelError(f"data: {str(file)!r} has greys that are no bytes; accepted: k/255 for k from 0 to 255")
    if labels.dtype.kind != "i" or labels.shape != (len(y),) or labels.min() < 0 or labels.max() >= CLASSES:
        raise KeelError(f"data: {str(file)!r} has other labels; accepted: whole numbers from 0 to {CLASSES - 1}")
    return bytes_.astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.uint8)
