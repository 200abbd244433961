"""Tables of settings: read from TOML, merged, overridden by "key=value", flattened and written back."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keel.config.network import Network
from keel.config.values import check_values
from keel.errors import KeelError, explain, shown, unknown_name

NOT_TOML = (ValueError, RecursionError)
"""What `tomllib.loads` raises: also for integers of thousands of digits, and for thousands of lists in each other."""

LONGEST = 10**7
"""The number of characters that a spec may have: /dev/zero does not end."""


def read_spec(path: Path) -> dict[str, Any]:
    """The table of a TOML file, not yet checked."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise KeelError(f"spec: {str(path)!r} must have at most {LONGEST} characters")
        table = tomllib.loads(text)
    except FileNotFoundError:
        raise KeelError(f"spec: file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KeelError(f"spec: cannot read {str(path)!r} ({error})") from None
    except NOT_TOML as error:
        raise KeelError(f"spec: {str(path)!r} is not valid TOML ({error})") from None
    check_values(table)
    return table


def override(table: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of `table` with each "key.of.field=value" applied; a value that is not TOML is taken as text."""
    result = merge(table)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not (equals and key):
            raise KeelError(f"--set must be key=value, as in local.lr=0.03 (got {shown(assignment)})")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except NOT_TOML:
            value = text
        try:
            put(result, key, value)
        except KeelError as error:
            raise KeelError(f"--set: {error}") from None
    check_values(result)
    return result


def read_network(assignments: Iterable[str]) -> Network:
    """The network that "field=value" texts describe."""
    return make_network(override({}, assignments))


def make_network(table: Mapping[str, Any]) -> Network:
    """The network that a table describes.

    Raises:
        KeelError: A field is not known, or its value is not valid.
    """
    for field in table:
        if field not in Network.model_fields:
            raise unknown_name("network field", field, Network.model_fields)
    try:
        return Network.model_validate(table)
    except ValidationError as error:
        raise KeelError(f"network.{explain(error)}") from None


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every field under its dotted name, as `--set` takes it."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set the field "key.of.field" of `table`."""
    *tables, field = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise KeelError(f"{shown(key)}: {shown(name)} is a field, not a table")
    table[field] = value


def merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables as one, field by field; later ones take precedence, and none of them is changed."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            if isinstance(value, Mapping):
                below = merged.get(key, {})
                merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
            else:
                merged[key] = value
    return merged
