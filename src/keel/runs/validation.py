"""Read the files of a run folder and check the types of everything in them.

A file may be damaged, or made by somebody else. Each function returns values of the declared types or raises a
KeelError of one line that names the file.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from reprlib import repr as short_repr
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from keel.config.overrides import make_network, read_spec
from keel.core.records import Environment, Record, Summary
from keel.errors import KeelError
from keel.runs.sealed import FIELD, check_seal, content, damaged

LARGEST = 1e150
"""Bound on numbers: their squares and sums are finite."""
DEEPEST = 16
"""Bound on tables in tables."""
_CONFIG = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]


def _bounded(kind: Any) -> Any:
    """Return a type with bounds on its numbers. A float may be null, as which a number that is not finite is stored."""
    if kind is float:
        return Number | None
    if kind is int:
        return Integer
    origin, parts = get_origin(kind), tuple(map(_bounded, get_args(kind)))
    if origin is None:
        return kind
    return reduce(or_, parts) if origin in (Union, UnionType) else origin[parts]


def _stored(kind: type, **required: Any) -> Any:
    """Return a type of records as it is stored: `required` keys, others optional or null, since versions differ."""
    types = {key: _bounded(hint) for key, hint in get_type_hints(kind).items()}
    keys = {key: NotRequired[hint | None] for key, hint in types.items()}
    keys |= {key: Required[hint] for key, hint in required.items()}
    return with_config(_CONFIG)(TypedDict(kind.__name__, keys))  # type: ignore[operator]


@with_config(_CONFIG)
class _Timing(TypedDict):
    round: Positive
    seconds: Number


@with_config(_CONFIG)
class _Named(TypedDict):
    name: str


@with_config(_CONFIG)
class _Participation(TypedDict):
    rate: Number
    sampler: str


@with_config(_CONFIG)
class _Evaluation(TypedDict):
    last: Positive


@with_config(_CONFIG)
class _Table(TypedDict):
    """The fields of a resolved spec that a reader may rely on."""

    seed: Integer
    rounds: Positive
    algorithm: _Named
    data: _Named
    model: _Named
    local: dict[str, Any]
    participation: _Participation
    evaluation: _Evaluation
    engine: _Named
    stop: NotRequired[dict[str, Any]]
    network: NotRequired[dict[str, Any]]


@with_config(_CONFIG)
class _Sizes(TypedDict):
    least: Count
    median: Number
    most: Count


@with_config(_CONFIG)
class _Picture(TypedDict):
    clients: list[Count | str]
    classes: list[Count | str]
    counts: list[list[Count]]
    examples: list[Count]
    client_names: NotRequired[list[str]]
    class_names: NotRequired[list[str]]


@with_config(_CONFIG)
class _Statistics(TypedDict):
    name: str
    clients: Positive
    train_examples: Count
    test_examples: Count
    classes: Count
    client_examples: _Sizes
    split: NotRequired[str]


@with_config(_CONFIG)
class _PicturedStatistics(_Statistics):
    label_entropy: Number
    label_entropy_whole: Number
    label_distance: Number
    picture: _Picture


_Status = Literal["finished", "stopped", "diverged", "interrupted"]
_TABLE = TypeAdapter(_Table)
_ENVIRONMENT = TypeAdapter(_stored(Environment, engine=str, title=str, loss=str, examples_sha256=str, parameters=Count))
_SUMMARY = TypeAdapter(_stored(Summary, status=_Status))
_RECORD: Any = _stored(Record, round=Positive, cohort=list[Count], bytes_down=Count, bytes_up=Count)
_RECORDS = TypeAdapter(list[_RECORD])
_TIMINGS = TypeAdapter(list[_Timing])
_STATISTICS, _PICTURED = TypeAdapter(_Statistics), TypeAdapter(_PicturedStatistics)
_CLASS = TypeAdapter(with_config(_CONFIG)(TypedDict("Model", {"class": str})))  # type: ignore[operator]


def read_table(file: Path) -> dict[str, Any]:
    """Return the resolved spec as a table of numbers, texts, lists and tables."""
    content(file)  # a pipe or a folder is refused before it is opened
    try:
        table = read_spec(file)
        _check_plain(table, DEEPEST)
        make_network(table.get("network", {}))
        return cast(dict[str, Any], _TABLE.validate_python(table))
    except ValidationError as error:
        raise damaged(file, _problem(error)) from None
    except RecursionError:
        raise damaged(file, "its values are nested too deeply") from None
    except ValueError as error:  # a KeelError, or an integer of too many digits
        raise damaged(file, str(error)) from None


def read_environment(file: Path) -> Environment:
    """Return what a run used besides its spec."""
    environment = {key: value for key, value in _json(_ENVIRONMENT, file).items() if value is not None}
    if "metric" in environment and "maximize" not in environment:
        raise damaged(file, "maximize is missing")
    return cast(Environment, environment)


def read_summary(file: Path, sealed: bool) -> Summary | None:
    """Return how the run ended; None while it has not. `sealed`: whether the file must have a checksum."""
    if not os.path.lexists(file):
        return None
    _check_seals(file, [content(file)], sealed)
    summary = _json(_SUMMARY, file)
    summary.pop(FIELD, None)
    for key in ("value", "maximize") if "metric" in summary else ("accuracy",):
        if key not in summary:
            raise damaged(file, f"{key} is missing")
    return cast(Summary, summary)


def read_statistics(file: Path) -> dict[str, Any] | None:
    """Return the client statistics; None if the run did not record them."""
    if not os.path.lexists(file):
        return None
    statistics = _json(_STATISTICS, file)
    if "picture" in statistics:
        statistics = _json(_PICTURED, file)
        _check_picture(file, statistics["picture"])
    return cast(dict[str, Any], statistics)


def read_model_class(file: Path) -> str | None:
    """Return the class of the model; None in folders of earlier versions."""
    return _json(_CLASS, file)["class"] if os.path.lexists(file) else None


def read_records(file: Path, sealed: bool) -> list[Record]:
    """Return the records of the rounds 1, 2, 3 and so on. `sealed`: whether each line must have a checksum."""
    return cast(list[Record], _lines(_RECORDS, file, sealed))


def read_seconds(file: Path, sealed: bool) -> list[float]:
    """Return the wall-clock time of each round."""
    return [timing["seconds"] for timing in _lines(_TIMINGS, file, sealed)]


def _json(kind: TypeAdapter[Any], file: Path) -> Any:
    try:
        return kind.validate_json(content(file))
    except ValidationError as error:
        raise damaged(file, _problem(error)) from None


def _check_seals(file: Path, parts: list[bytes], sealed: bool) -> None:
    for number, part in enumerate(parts, start=1):
        try:
            check_seal(part, sealed)
        except ValueError as error:
            raise damaged(file, f"line {number}: {error}" if len(parts) > 1 else str(error)) from None


def _lines(kind: TypeAdapter[Any], file: Path, sealed: bool) -> list[Any]:
    """Return the values in the complete lines, one for each round: a kill can truncate the last one."""
    lines = content(file).split(b"\n")[:-1]
    _check_seals(file, lines, sealed)
    with _without_collector():
        values = _values(kind, file, lines)
    for number, value in enumerate(values, start=1):
        value.pop(FIELD, None)
        if value["round"] != number:
            raise damaged(file, f"line {number} is about round {value['round']}")
    return values


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the garbage collector: it takes most of the time in which many records are read, which have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _values(kind: TypeAdapter[Any], file: Path, lines: list[bytes]) -> list[Any]:
    """Return one value per line."""
    try:
        values: list[Any] = kind.validate_json(b"[%b]" % b",".join(lines))  # all at once is several times faster
        if len(values) == len(lines):
            return values
    except ValidationError:
        pass  # the line with the error is looked for below
    for number, line in enumerate(lines, start=1):
        try:
            if len(kind.validate_json(b"[%b]" % line)) != 1:
                raise damaged(file, f"line {number} has not one record")
        except ValidationError as error:
            raise damaged(file, f"line {number}: {_problem(error)}") from None
    raise damaged(file, "its lines are not valid JSON")


def _check_picture(file: Path, picture: dict[str, Any]) -> None:
    """Raise a KeelError unless the picture is a table of clients by classes."""
    clients, classes = len(picture["clients"]), len(picture["classes"])
    rows = {len(picture[key]) for key in ("counts", "examples", "client_names") if key in picture}
    columns = {len(row) for row in (*picture["counts"], picture.get("class_names", picture["classes"]))}
    if rows != {clients} or columns != {classes}:
        raise damaged(file, "the label distribution is not a table of clients by classes")
    if any(total < sum(row) for row, total in zip(picture["counts"], picture["examples"], strict=True)):
        raise damaged(file, "a client has more labels than examples")


def _check_plain(value: Any, depth: int, field: str = "") -> None:
    """Raise a KeelError unless a value has only numbers, texts, lists and tables, all of them bounded."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise KeelError("its values are nested too deeply")
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(each, depth - 1, f"{field}.{key}" if field else str(key))
    elif isinstance(value, bool | str):
        return
    elif not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise KeelError(f"{field} must be a finite number, a text, a list or a table (got {short_repr(value)})")


def _problem(error: ValidationError) -> str:
    """Return the first problem in one line: the field, what it must be, and its value."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part.isidentifier())
    message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    if first["type"] == "missing":
        return f"{field} is missing"
    if first["type"] == "json_invalid":
        return message.replace("invalid JSON", "not valid JSON")
    return f"{field}: {message} (got {short_repr(first['input'])})"
