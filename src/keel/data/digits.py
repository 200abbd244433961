"""The UCI optical digits, embedded: 1,797 images of 8x8 in ten classes (digits.txt has the attribution)."""

from importlib.resources import files

import numpy as np
import torch

from keel.data.federated import Examples
from keel.randomness import draws

TEST_EXAMPLES = 297


def load() -> tuple[Examples, Examples]:
    """1,500 images to train and 297 to test, the same ones in every run, pixels scaled to [0, 1]."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images, labels = archive["images"], archive["labels"]
    inputs = torch.from_numpy(images).float().flatten(1) / 16
    examples = Examples(inputs, torch.from_numpy(labels).long())
    order = draws(0, "digits test").permutation(len(labels))
    return examples[order[TEST_EXAMPLES:]], examples[order[:TEST_EXAMPLES]]
