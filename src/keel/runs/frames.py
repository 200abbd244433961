"""Results as pandas data frames. pandas is imported when a frame is made."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from keel.errors import KeelError

if TYPE_CHECKING:
    import pandas

BY_FIELD = ("fields", "differing")
"""Tables in a row whose keys are fields of the spec, and become columns under their own names."""


def make_frame(rows: Iterable[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return one row per mapping. A table in a row becomes columns.

    Raises:
        KeelError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise KeelError("to_frame() requires pandas: pip install 'keel-fl[frame]'") from None
    return pandas.DataFrame([_flat(row) for row in rows])


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, Mapping):
            flat[name] = value
        elif name in BY_FIELD:
            flat |= value
        else:
            flat |= {f"{name}_{key}": item for key, item in value.items()}
    return flat
