"""The values that a table of settings may have. They are checked before anything computes with them or prints them."""

from collections.abc import Mapping
from math import isfinite, isnan
from typing import Any

from keel.algorithms import Algorithm
from keel.errors import KeelError, shown

DEEPEST = 16
"""The largest number of tables and lists within each other."""
LONGEST = 4096
"""The largest number of characters of a text: that of a path."""
LARGEST = 2**63 - 1
"""The largest integer, that of TOML."""
FLOAT32 = (1.2e-38, 3.4e38)
"""The smallest and the largest magnitude of a number: models are trained in float32."""


def check_values(table: Mapping[Any, Any], above: str = "", depth: int = 0) -> None:
    """Raise a KeelError if a field has a name or a value that TOML cannot hold, or one that is too large.

    A field that is None counts as left out, and an algorithm may be an object.

    Args:
        above: The name of the table, with a dot, which an error names.
        depth: The number of tables and lists around it.
    """
    for name, value in table.items():
        if not isinstance(name, str):
            raise KeelError(f"the name of a field must be a text (got {shown(name)})")
        _check_text("the name of a field", name)
        if value is not None:
            _check(shown(above + name)[1:-1], value, depth + 1)


def _check(field: str, value: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise KeelError(f"{field} is nested too deeply; use at most {DEEPEST} tables and lists within each other")
    if isinstance(value, Mapping):
        check_values(value, f"{field}.", depth)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(field, item, depth + 1)
    elif isinstance(value, str):
        _check_text(field, value)
    elif not isinstance(value, int | float | Algorithm):
        raise KeelError(f"{field} must be a number, text, true or false, a list or a table (got {shown(value)})")
    elif isinstance(value, float) and isnan(value):
        raise KeelError(f"{field} must be a finite number (got nan)")
    elif isinstance(value, float) and value and isfinite(value) and not FLOAT32[0] <= abs(value) <= FLOAT32[1]:
        smallest, largest = FLOAT32
        raise KeelError(f"{field} must be 0 or from {smallest:g} to {largest:g}, the range of float32 (got {value!r})")
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        bits = value.bit_length()
        raise KeelError(f"{field} must be an integer from -{LARGEST} to {LARGEST} (got one of {bits} bits)")


def _check_text(field: str, text: str) -> None:
    if len(text) > LONGEST:
        raise KeelError(f"{field} must have at most {LONGEST} characters (got {len(text)}, {shown(text)})")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise KeelError(f"{field} must be valid Unicode (got {shown(text)})") from None
    if "\0" in text:
        raise KeelError(f"{field} must not contain a null character (got {shown(text)})")
