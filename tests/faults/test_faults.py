"""A few cases of each kind of fault; `make faults` runs as many as asked for."""

import pytest

from faults.__main__ import KINDS, SLOW, run_kind

CASES = {
    "bytes": 2,
    "clock": 2,
    "command_lines": 30,
    "damage": 8,
    "disk": 2,
    "engines": 8,
    "kill_chains": 1,
    "kills": 2,
    "messages": 300,
    "readers": 150,
    "reports": 20,
    "signals": 2,
    "specs": 300,
    "trained_specs": 3,
    "two_writers": 2,
}
"""Cases of a kind that are cheap or dear; others have 10."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SLOW])
def test_no_case_fails(kind: str) -> None:
    assert run_kind(kind, CASES.get(kind, 10), seed=0, seconds=60) == 0
