"""Codecs: against a naive implementation, unbiased or contracting, of exact size, and strict in what they decode."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from keel.compression.codecs import Codec, Int4, Int8, RandomK, Sign, TopK, kept
from keel.core.randomness import keyed_rng
from keel.errors import KeelError
from tests.compression import naive

VECTORS = st.integers(1, 300).flatmap(
    lambda size: arrays(np.float32, size, elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False))
)
CODECS = [TopK(0.1), RandomK(0.1, False), RandomK(0.1, True), Int8(), Int4(), Sign()]


def draw(round: int = 0) -> Callable[[], np.random.Generator]:
    return lambda: keyed_rng(1, "test", round)


def round_trip(codec: Codec, x: np.ndarray, round: int = 0) -> np.ndarray:
    return codec.decode(codec.encode(x, draw(round)), len(x), draw(round))


def normal(size: int) -> np.ndarray:
    return keyed_rng(0, "vector").standard_normal(size).astype(np.float32)


@given(VECTORS, st.floats(0.001, 1))
def test_top_k_keeps_the_largest_magnitudes(x: np.ndarray, fraction: float) -> None:
    parts = TopK(fraction).encode(x, draw())
    k = kept(len(x), fraction)
    assert len(parts["indices"]) == len(parts["values"]) == k
    assert sorted(np.abs(parts["values"])) == sorted(abs(v) for v in naive.largest(x.tolist(), k).values())
    if len(set(np.abs(x))) == len(x):
        decoded = TopK(fraction).decode(parts, len(x), draw())
        assert {i: v for i, v in enumerate(decoded.tolist()) if i in parts["indices"]} == naive.largest(x.tolist(), k)


@given(VECTORS, st.integers(0, 100))
def test_int8_and_int4_round_each_element_up_or_down(x: np.ndarray, round: int) -> None:
    uniform = keyed_rng(1, "test", round).random(len(x), dtype=np.float32)
    for codec, levels in ((Int8(), 127), (Int4(), 7)):
        numbers, units = naive.quantised(x, levels, uniform)
        parts = codec.encode(x, draw(round))
        assert parts["scales"].tolist() == units
        assert parts["values"].tolist() == (numbers if levels == 127 else naive.packed_halves(numbers))
        decoded = codec.decode(parts, len(x), draw(round))
        each = np.repeat(np.float32(units), 64)[: len(x)]
        assert decoded.tolist() == (np.float32(numbers) * each).tolist()


@given(VECTORS)
def test_sign_sends_a_bit_per_element_and_the_mean_magnitude(x: np.ndarray) -> None:
    parts = Sign().encode(x, draw())
    assert parts["bits"].tolist() == naive.packed_signs(x)
    assert parts["scales"] == pytest.approx(np.mean(np.abs(x.astype(np.float64))), rel=1e-6)
    expected = [parts["scales"][0] if value >= 0 else -parts["scales"][0] for value in x]
    assert round_trip(Sign(), x).tolist() == expected


@given(VECTORS, st.integers(0, 100))
def test_random_k_sends_no_positions(x: np.ndarray, round: int) -> None:
    codec = RandomK(0.2, unbiased=False)
    parts = codec.encode(x, draw(round))
    assert list(parts) == ["values"]
    decoded = codec.decode(parts, len(x), draw(round))
    assert ((decoded == 0) | (decoded == x)).all()
    assert len(parts["values"]) == kept(len(x), 0.2)


@given(VECTORS, st.integers(0, 1000))
def test_contracting_codecs_lose_less_than_the_vector(x: np.ndarray, round: int) -> None:
    norm = float((x.astype(np.float64) ** 2).sum())
    for codec, rest in ((TopK(0.1), 1 - kept(len(x), 0.1) / len(x)), (RandomK(0.1, False), 1.0), (Sign(), 1.0)):
        lost = float(((x.astype(np.float64) - round_trip(codec, x, round)) ** 2).sum())
        assert lost <= rest * norm * (1 + 1e-5)


@pytest.mark.parametrize(("codec", "bound"), [(RandomK(0.1, False), 0.9), (Int8(), 0.001), (Int4(), 64 / 196)])
@pytest.mark.parametrize("shape", ["normal", "spike"])
def test_the_mean_loss_of_random_codecs_has_its_bound(codec: Codec, bound: float, shape: str) -> None:
    x = normal(640)
    if shape == "spike":  # one large element makes the unit of its block large
        x[:64] = 0.07
        x[0] = 1.0
    lost = np.mean([((x - round_trip(codec, x, round)) ** 2).sum() for round in range(300)])
    assert lost / (x**2).sum() <= bound * 1.1


@pytest.mark.parametrize("codec", [RandomK(0.2, True), Int8(), Int4()])
def test_the_mean_of_unbiased_codecs_is_the_vector(codec: Codec) -> None:
    x, rounds = normal(200), 3000
    samples = np.stack([round_trip(codec, x, round) for round in range(rounds)]).astype(np.float64)
    errors = np.abs(samples.mean(axis=0) - x)
    assert (errors < 5 * samples.std(axis=0) / np.sqrt(rounds) + 1e-6).all()  # five standard errors


@pytest.mark.parametrize(
    ("codec", "size"),
    [(TopK(0.01), 80), (RandomK(0.01, True), 40), (Int8(), 1063), (Int4(), 564), (Sign(), 129)],
)
def test_the_encoded_bytes(codec: Codec, size: int) -> None:
    assert sum(part.nbytes for part in codec.encode(normal(999), draw()).values()) == size


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e-45, 3e38])
def test_every_value_is_encoded_and_a_diverged_vector_stays_so(codec: Codec, value: float) -> None:
    decoded = round_trip(codec, np.full(40, value, np.float32))
    if not np.isfinite(value):
        assert not np.isfinite(decoded).all()
    elif value < 1:
        assert np.isfinite(decoded).all()


HOSTILE: list[tuple[Codec, dict[str, np.ndarray], str]] = [
    (TopK(0.1), {"indices": np.int32([-1, 3])}, "indices must increase from 0 or more to at most 19"),
    (TopK(0.1), {"indices": np.int32([3, 20])}, "indices must increase"),
    (TopK(0.1), {"indices": np.int32([3, 3])}, "indices must increase"),
    (TopK(0.1), {"indices": np.int32([2**31 - 1, -(2**31)])}, "indices must increase"),
    (TopK(0.1), {"indices": np.int32([4, 3])}, "indices must increase"),
    (Int8(), {"values": np.full(20, -128, np.int8)}, "values must be from -127 to 127"),
    (Int8(), {"scales": np.float32([-1])}, "scales must not be negative"),
    (Int4(), {"values": np.full(10, 0xF0, np.uint8)}, "values must be pairs of numbers from -7 to 7"),
    (Sign(), {"scales": np.float32([-1])}, "scales must not be negative"),
    (Sign(), {"bits": np.uint8([0, 0, 1])}, "bits after the last element must be 0"),
]


@pytest.mark.parametrize(("codec", "parts", "message"), HOSTILE)
def test_what_no_encoder_returns_is_refused(codec: Codec, parts: dict[str, np.ndarray], message: str) -> None:
    sent = {**codec.encode(normal(20), draw()), **parts}
    with pytest.raises(KeelError, match=message):
        codec.decode(sent, 20, draw())


def test_the_half_byte_after_the_last_element_is_checked() -> None:
    sent = Int4().encode(normal(21), draw())
    sent["values"][-1] |= 15
    with pytest.raises(KeelError, match="values must be pairs"):
        Int4().decode(sent, 21, draw())
