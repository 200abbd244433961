"""The UCI optical digits, embedded (digits.txt has the attribution): pixels in [0, 1], the same test ones always."""

from importlib.resources import files

import numpy as np
import torch

from keel.data.federated import Examples, Pool
from keel.randomness import draws

TEST_EXAMPLES = 297


def digits() -> Pool:
    """1,797 handwritten digits of 8x8, embedded; 1,500 of them to train."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images, labels = archive["images"], archive["labels"]
    inputs = torch.from_numpy(images).float().flatten(1) / 16
    examples = Examples(inputs, torch.from_numpy(labels).long())
    order = draws(0, "digits test").permutation(len(labels))
    return Pool(examples[order[TEST_EXAMPLES:]], examples[order[:TEST_EXAMPLES]], classes=10)
