import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.data.preparation import Pixels, Tokens
from keel.randomness import draws


def images(count: int, height: int = 6, width: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.manual_seed(0))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_a_moved_image_is_the_padded_one_cut_out_and_perhaps_mirrored(count: int, margin: int, seed: int) -> None:
    pixels = Pixels((0.0,) * 3, (1 / 255,) * 3, margin)
    stored = images(count)
    choices = pixels.draw(count, draws(seed, "preparation"))
    assert choices is not None
    prepared = pixels(stored, choices)
    for image, (down, right, mirrored), moved in zip(stored.numpy(), choices, prepared, strict=True):
        padded = np.pad(image, [(0, 0), (margin, margin), (margin, margin)])
        cut = padded[:, down : down + image.shape[1], right : right + image.shape[2]]
        np.testing.assert_allclose(moved, cut[:, :, ::-1] if mirrored else cut, atol=1e-3)


def test_all_moves_are_drawn_and_equally_often() -> None:
    choices = Pixels((0.5,), (0.5,), margin=4).draw(9000, draws(0, "preparation"))
    assert choices is not None
    for column, values in zip(choices.T, (9, 9, 2), strict=True):
        share = np.bincount(column, minlength=values) / len(column)
        np.testing.assert_allclose(share, 1 / values, atol=0.02)


def test_evaluation_leaves_nothing_to_chance() -> None:
    pixels = Pixels((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), margin=4)
    stored = images(4)
    naive = (stored.double() / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[
        :, None, None
    ]
    torch.testing.assert_close(pixels(stored), naive.float())
    assert Pixels((0.1,), (0.4,)).draw(4, draws(0, "preparation")) is None


def test_tokens_are_stored_small_and_used_large() -> None:
    assert Tokens()(torch.tensor([[1, 255]], dtype=torch.uint8)).dtype == torch.int64
