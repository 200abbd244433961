"""Sets a field of a table whose algorithm may be an object."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from keel.algorithms import Algorithm
from keel.config.overrides import put
from keel.errors import KeelError, explain, unknown_name


def put_field(table: dict[str, Any], field: str, value: Any) -> None:
    """Set a field of a table, also a hyper-parameter of an algorithm that is an object."""
    section, _, name = field.partition(".")
    algorithm = table.get("algorithm")
    if section != "algorithm" or not isinstance(algorithm, Algorithm):
        put(table, field, value)
        return
    if name not in (settings := algorithm.settings()):
        raise unknown_name("hyper-parameter", name, settings, owner=type(algorithm).__name__)
    try:
        table["algorithm"] = replace(algorithm, **{name: value})
    except ValidationError as error:
        raise KeelError(explain(error, "algorithm")) from None
