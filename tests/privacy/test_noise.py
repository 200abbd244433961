"""The Gaussian noise: its distribution, in the tails as well, and where it comes from."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
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


def words_of(word: int, angle: int = 0) -> Callable[[int], NDArray[np.uint64]]:
    """Words of two pairs: two radii, and one word with two angles."""
    return lambda count: np.array([word] * (count - 1) + [angle], np.uint64)


def test_a_radius_takes_64_bits() -> None:
    assert float(_box_muller(words_of(1), torch.empty(4))[0]) == pytest.approx(np.sqrt(2 * 63 * np.log(2)), rel=1e-5)
    almost_one = (1 << 63) - (1 << 20)
    smallest = np.sqrt(-2 * np.log1p(-(2.0**-43)))
    assert float(_box_muller(words_of(almost_one), torch.empty(4))[0]) == pytest.approx(smallest, rel=1e-5)


def test_an_angle_has_its_own_bits() -> None:
    quarter, half = 1 << 30, 1 << 31
    noise = _box_muller(words_of(1, quarter | half << 32), torch.empty(2, 2))
    assert noise[0].tolist() == pytest.approx([0, -9.345], abs=1e-3)
    assert noise[1].tolist() == pytest.approx([9.345, 0], abs=1e-3)


def test_the_noise_does_not_depend_on_the_default_type() -> None:
    expected = keyed_noise(keyed_rng(0, "noise"))(torch.zeros(9))
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(keyed_noise(keyed_rng(0, "noise"))(torch.zeros(9, dtype=torch.float32)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


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


def test_secret_noise_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda size: bytes(size))
    assert torch.equal(secret_noise(torch.empty(4)), _box_muller(words_of(0), torch.empty(4)))


def test_secret_noise_never_repeats() -> None:
    first, second = secret_noise(torch.empty(1000)), secret_noise(torch.empty(1000))
    assert not torch.equal(first, second)
