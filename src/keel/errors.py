"""The exceptions of Keel. A KeelError is one that the user can fix: the command prints one line and exits with 2."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class KeelError(ValueError):
    """An invalid spec, option or data set; the message names the field, the value and the fix."""


class DamagedFile(KeelError):
    """A file of a run does not have the content that was written."""


class Interrupted(Exception):
    """Ctrl-C, SIGTERM or SIGHUP ended the work, which can be continued; the message says how."""

    def __init__(self, message: str = "run the same command again to continue"):
        super().__init__(message)


SHOWN = 150
"""The number of characters of a value that an error prints."""


def shown(value: object) -> str:
    """The value as Python writes it, in one line and shortened where it is long."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def one_line(error: BaseException) -> str:
    """The type and the text of another library's exception, as one printable line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {printable(text[: 4 * SHOWN])}"


def printable(text: str) -> str:
    """The text with a question mark for each character that cannot be printed."""
    return "".join(c if c.isprintable() else "?" for c in text)


def unknown_name(kind: str, value: str, known: Iterable[str], also: str = "", owner: str = "") -> KeelError:
    """The error for an unknown name, with a suggestion if a known name is similar.

    Args:
        also: What is accepted besides the known names.
        owner: What has the known names, such as the algorithm of a hyper-parameter.
    """
    names = sorted(known)
    unknown = f"unknown {kind} {shown(value)}" + (f" for {owner}" if owner else "")
    if not names and not also:
        return KeelError(f"{unknown}, which has no {kind}s; remove it" if owner else f"{unknown}; remove it")
    lower = {name.lower(): name for name in names}
    near = get_close_matches(value.lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]!r}? " if near else ""
    return KeelError(f"{unknown}; {hint}known: {', '.join([*names, *([also] if also else [])])}")


def explain(error: "ValidationError", table: str = "") -> str:
    """Pydantic's error as one line: the first problem in full, and the number of the others."""
    problems = error.errors(include_url=False)
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, KeelError):
        return f"{cause}{more}"
    parts = [table, *(str(part) for part in first["loc"])]
    field = ".".join(part for part in parts if part.isidentifier() or part.isdigit())
    if cause is not None:
        return f"{field}: {cause}{more}"
    message = first["msg"].removeprefix("Input should be ")
    if first["type"] in ("bool_parsing", "bool_type"):
        message = "true or false"
    if message == first["msg"]:
        return f"{field}: {message[:1].lower()}{message[1:]} (got {shown(first['input'])}){more}"
    return f"{field} must be {message} (got {shown(first['input'])}){more}"
