"""The Gaussian noise: its distribution, in the tails as well, and where it comes from."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from keel.core.randomness import keyed_rng
from keel.privacy.noise import _box_muller, keyed_noise, secret_noise


def test_the_noise_is_gaussian_up_to_its_tails() -> None:
    drawn = keyed_noise(keyed_rng(0, "noise"))(torch.empty(4_000_000)).numpy()
    edges = np.array([-np.inf, -4.5, -4, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4, 4.5, np.inf])
    expected = np.diff(stats.norm.cdf(edges)) * len(drawn)
    counted = np.array([((low < drawn) & (drawn <= high)).sum() for low, high in pairwise(edges)])
    assert stats.chisquare(counted, expected, sum_check=False).pvalue > 0.001
    assert stats.kstest(drawn, "norm").pvalue > 0.001


def test_the_two_numbers_of_a_pair_are_independent() -> None:
    first, second = keyed_noise(keyed_rng(1, "noise"))(torch.empty(2, 1_000_000)).numpy()
    for a, b in ((first, second), (first**2, second**2), (first[1:], first[:-1]), (second[1:], second[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / 1000  # four standard errors
    assert stats.kstest((first + second) / np.sqrt(2), "norm").pvalue > 0.001


@pytest.mark.parametrize("word", [0, 1, 1 << 63, (1 << 63) - 1, (1 << 64) - 1])
def test_every_word_gives_a_finite_number(word: int) -> None:
    noise = _box_muller(lambda words: np.full(words, word, np.uint64), torch.empty(6))
    assert torch.isfinite(noise).all()
    assert noise.abs().max() < 9.4


@pytest.mark.parametrize("draw", [keyed_noise(keyed_rng(0, "noise")), secret_noise])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (5,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_noise_has_the_shape_and_type_of_the_tensor(
    draw: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    noise = draw(torch.zeros(shape, dtype=dtype))
    assert (noise.shape, noise.dtype) == (torch.Size(shape), dtype)


def test_equal_keys_give_equal_bits_on_any_number_of_threads() -> None:
    like, threads = torch.empty(100_001), torch.get_num_threads()
    drawn = []
    for count in (1, 2):
        torch.set_num_threads(count)
        drawn.append(keyed_noise(keyed_rng(7, "noise"))(like))
    torch.set_num_threads(threads)
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], keyed_noise(keyed_rng(8, "noise"))(like))


def test_secret_noise_never_repeats() -> None:
    first, second = secret_noise(torch.empty(1000)), secret_noise(torch.empty(1000))
    assert not torch.equal(first, second)
