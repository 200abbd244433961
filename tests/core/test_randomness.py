"""Keyed random numbers: equal keys draw equal numbers, and the caller's generators stay unchanged."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.core.randomness import key, keyed_rng
from keel.core.torch_randomness import keyed_torch_rng, seed_torch

keys = st.tuples(st.integers(0, 2**31), st.text(max_size=8), st.integers(0, 10**6), st.integers(0, 10**6))


@given(keys, keys)
def test_equal_keys_draw_equal_numbers_and_different_keys_differ(one: tuple, other: tuple) -> None:
    assert keyed_rng(*one).integers(2**62) == keyed_rng(*one).integers(2**62)
    assert (key(*one) == key(*other)) == (one == other)


def test_draws_are_those_of_earlier_versions() -> None:
    # Runs of an earlier version must resume to the same bits.
    assert keyed_rng(0, "cohort", 1).integers(1000, size=4).tolist() == [506, 465, 154, 524]


@given(keys)
def test_the_generator_is_philox_with_this_key(one: tuple) -> None:
    expected = np.random.Generator(np.random.Philox(key=key(*one)))
    assert keyed_rng(*one).integers(2**62, size=3).tolist() == expected.integers(2**62, size=3).tolist()


def test_torch_draws_are_keyed_and_leave_the_callers_generator_unchanged() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with keyed_torch_rng(0, "model"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with keyed_torch_rng(0, "model"):
        assert torch.equal(torch.rand(2), inside)


class FakeDevice:
    """An accelerator's module, as torch.get_device_module returns it."""

    def __init__(self) -> None:
        self.state, self.seeds = "the caller's", list[int]()

    def get_rng_state(self) -> str:
        return self.state

    def set_rng_state(self, state: str) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = f"seeded {seed}"
        self.seeds.append(seed)


def test_draws_on_an_accelerator_are_keyed_and_the_callers_generator_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    with keyed_torch_rng(0, "model", device=torch.device("cuda")):
        seed_torch(0, "local", 1, device=torch.device("cuda"))
    assert device.state == "the caller's"
    assert device.seeds == [key(0, "model") % 2**63, key(0, "local", 1) % 2**63]


def test_draws_on_the_cpu_use_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device"))
    monkeypatch.setattr(torch, "get_device_module", lambda name: pytest.fail("uses an accelerator"))
    with keyed_torch_rng(0, "model"):
        seed_torch(0, "local", 1)
