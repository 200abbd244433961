"""A federation in one process has the bits of `serial`, and no answer of a site can spoil it."""

from pathlib import Path

import pytest

from keel.algorithms import REGISTRY
from tests.deploy.conftest import InOneProcess, serial

NAMES = sorted(set(REGISTRY) - {"centralized"})


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_the_bits_and_the_bytes_of_serial(
    name: str, federation: InOneProcess, tmp_path: Path
) -> None:
    there = federation(algorithm__name=name)
    here = serial(tmp_path / "serial", algorithm__name=name)
    assert there.summary["model_sha256"] == here.summary["model_sha256"]
    assert there.records == here.records
