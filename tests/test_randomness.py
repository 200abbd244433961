import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.randomness import draws, key, torch_draws

position = st.tuples(st.integers(0, 2**31), st.text(max_size=8), st.integers(0, 10**6), st.integers(0, 10**6))


@given(position, position)
def test_equal_positions_draw_equally_and_others_do_not(one: tuple, other: tuple) -> None:
    assert draws(*one).integers(2**62) == draws(*one).integers(2**62)
    assert (key(*one) == key(*other)) == (one == other)


def test_a_known_draw_stays_what_it_is() -> None:
    # Runs of an earlier version must resume to the same bits.
    assert draws(0, "cohort", 1).integers(1000, size=4).tolist() == [506, 465, 154, 524]


@given(position)
def test_the_key_is_that_of_the_stream(one: tuple) -> None:
    expected = np.random.Generator(np.random.Philox(key=key(*one)))
    assert draws(*one).integers(2**62, size=3).tolist() == expected.integers(2**62, size=3).tolist()


def test_torch_draws_are_keyed_and_leave_the_callers_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with torch_draws(0, "model"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with torch_draws(0, "model"):
        assert torch.equal(torch.rand(2), inside)
