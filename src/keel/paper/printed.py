"""The numbers that the paper prints, read from printed.toml."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def printed_tables() -> dict[str, Any]:
    """Return the content of printed.toml."""
    return tomllib.loads(files(__package__).joinpath("printed.toml").read_text(encoding="utf-8"))


def printed_value(table: str, column: str | None, method: str) -> Any:
    """Return what the paper prints for a method in a column of a table, or None if it prints nothing."""
    return printed_tables()[table].get(column, {}).get(method)
