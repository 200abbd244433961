"""Numbers as people read them."""

import pytest

from keel.units import duration

HOUR = 3600.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60.0, "1 min"),
        (59.6 * 60, "1 h"),
        (1.5 * HOUR + 300, "1 h 35 min"),
        (2 * HOUR, "2 h"),
        (23 * HOUR + 59 * 60, "23 h 59 min"),
        (24 * HOUR, "1.0 days"),
        (60 * HOUR, "2.5 days"),
        (240 * HOUR, "10 days"),
        (2050 * HOUR, "85 days"),
    ],
)
def test_a_duration_has_the_unit_that_suits_its_length(seconds: float, text: str) -> None:
    assert duration(seconds) == text
