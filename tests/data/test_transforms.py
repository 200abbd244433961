import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.core.randomness import keyed_rng
from keel.data.transforms import Pixels, Tokens


def images(count: int, height: int = 6, width: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.manual_seed(0))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_augmentation_is_a_crop_of_the_padded_image_and_a_flip(count: int, margin: int, seed: int) -> None:
    pixels = Pixels((0.0,) * 3, (1 / 255,) * 3, margin)
    stored = images(count)
    choices = pixels.draw(count, keyed_rng(seed, "preparation"))
    assert choices is not None
    augmented = pixels(stored, choices)
    for image, (top, left, flip), result in zip(stored.numpy(), choices, augmented, strict=True):
        padded = np.pad(image, [(0, 0), (margin, margin), (margin, margin)])
        crop = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        np.testing.assert_allclose(result, crop[:, :, ::-1] if flip else crop, atol=1e-3)


def test_crops_and_flips_are_drawn_uniformly() -> None:
    choices = Pixels((0.5,), (0.5,), margin=4).draw(9000, keyed_rng(0, "preparation"))
    assert choices is not None
    for column, values in zip(choices.T, (9, 9, 2), strict=True):
        share = np.bincount(column, minlength=values) / len(column)
        np.testing.assert_allclose(share, 1 / values, atol=0.02)


def test_evaluation_only_normalises() -> None:
    pixels = Pixels((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), margin=4)
    stored = images(4)
    naive = (stored.double() / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[
        :, None, None
    ]
    torch.testing.assert_close(pixels(stored), naive.float())
    assert Pixels((0.1,), (0.4,)).draw(4, keyed_rng(0, "preparation")) is None


def test_tokens_become_int64() -> None:
    assert Tokens()(torch.tensor([[1, 255]], dtype=torch.uint8)).dtype == torch.int64
