"""Runs the public contract suite on every built-in algorithm and on one from outside the package."""

import pytest

from keel.algorithms import REGISTRY
from tests.contract.own import Lookahead


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cls" in metafunc.fixturenames:
        metafunc.parametrize("cls", [*REGISTRY.values(), Lookahead], ids=lambda cls: cls.name)
