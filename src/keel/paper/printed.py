"""The numbers that the paper prints, as kept in printed.toml."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def tables() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("printed.toml").read_text(encoding="utf-8"))


def printed(table: str, column: str | None, method: str) -> Any:
    """What a table has in that column for a method; None where it has nothing."""
    return tables()[table].get(column, {}).get(method)
