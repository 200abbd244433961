"""The UCI optical digits, embedded in the package (attribution in digits.txt). Pixels are scaled to [0, 1]."""

from importlib.resources import files

import numpy as np
import torch

from keel.core.examples import Examples
from keel.core.randomness import keyed_rng
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset

TEST_EXAMPLES = 297


def digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels, embedded; 1,500 for training."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images, labels = archive["images"], archive["labels"]
    inputs = torch.from_numpy(images).float().flatten(1) / 16
    examples = Examples(inputs, torch.from_numpy(labels).long())
    order = keyed_rng(0, "digits test").permutation(len(labels))  # the same test examples in every run
    return Dataset(
        examples[order[TEST_EXAMPLES:]], examples[order[:TEST_EXAMPLES]], 10, class_names=tuple("0123456789")
    )


ENTRY = CatalogEntry(digits)
