"""The pytest plugin of the contract suite: the option --algorithm."""

from contextlib import suppress

import pytest

DESTINATION = "keel_algorithm"
"""The name of the option's value, which tells it from an option --algorithm of another plugin."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keel", "Keel's contract suite (pytest --pyargs keel.testing)")
    with suppress(ValueError):  # another plugin may have an option of this name
        group.addoption(
            "--algorithm",
            dest=DESTINATION,
            action="append",
            metavar="NAME",
            help="A built-in algorithm, or module:Class; may be repeated. Every built-in algorithm by default.",
        )


def pytest_configure(config: pytest.Config) -> None:
    """Check the names before the collection, which would print an error with its traceback."""
    if names := config.getoption(DESTINATION, default=None):
        from keel.algorithms import algorithm_class  # only here: every pytest run loads this plugin
        from keel.errors import KeelError

        try:
            for name in names:
                algorithm_class(name)
        except KeelError as error:
            raise pytest.UsageError(str(error).replace("algorithm.name", "--algorithm", 1)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ == "keel.testing.test_contract" and "cls" in metafunc.fixturenames:
        from keel.algorithms import REGISTRY, algorithm_class

        names = metafunc.config.getoption("--algorithm") or list(REGISTRY)
        metafunc.parametrize("cls", [algorithm_class(name) for name in names], ids=names)
