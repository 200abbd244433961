"""The pytest plugin of the contract suite: the option --algorithm."""

from contextlib import suppress

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keel", "Keel's contract suite (pytest --pyargs keel.testing)")
    with suppress(ValueError):  # another plugin may have an option of this name
        group.addoption(
            "--algorithm",
            action="append",
            metavar="NAME",
            help="A built-in algorithm, or module:Class; may be repeated. Every built-in algorithm by default.",
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ == "keel.testing.test_contract" and "cls" in metafunc.fixturenames:
        from keel.algorithms import REGISTRY, algorithm_class  # only here: every pytest run loads this plugin

        names = metafunc.config.getoption("--algorithm") or list(REGISTRY)
        metafunc.parametrize("cls", [algorithm_class(name) for name in names], ids=names)
