"""The one exception that means: the user can mend this. The command prints it as one line and exits with 2."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class KeelError(ValueError):
    """A mistake in a spec, an option or the data, said in the user's words with what would be accepted."""


class Stopped(Exception):
    """Ctrl-C came while many runs were under way: each has finished its round and saved it."""


def unknown(kind: str, value: str, known: Iterable[str]) -> KeelError:
    """An error for a name that is not known, with the nearest known one if there is one."""
    names = sorted(known)
    lower = {name.lower(): name for name in names}
    near = get_close_matches(value.lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]!r}? " if near else ""
    return KeelError(f"{kind}: {value!r} is not known; {hint}accepted: {', '.join(names)}")


def explain(error: "ValidationError", table: str = "") -> str:
    """pydantic's findings as one line: the first in full, the number of the others."""
    findings = error.errors(include_url=False)
    first = findings[0]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, KeelError):
        return f"{cause}{more}"
    parts = [table, *(str(part) for part in first["loc"])]
    field = ".".join(part for part in parts if part.isidentifier() or part.isdigit())
    if cause is not None:
        return f"{field}: {cause}{more}"
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in ("bool_parsing", "bool_type"):
        message = "should be true or false"
    return f"{field}: {message}, not {first['input']!r}{more}"
