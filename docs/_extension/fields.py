"""Every field of a spec with its type, its default and its bounds, from the schema."""

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from keel.algorithms import REGISTRY
from keel.config.schema import Spec

BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


def markdown() -> str:
    """Return a table of the fields of every table, and one of the settings of every algorithm."""
    lines = ["| field | type | default |", "|---|---|---|"]
    for name, info in Spec.model_fields.items():
        if table := _table_of(info.annotation):
            lines += [_row(f"{name}.{field}", inner) for field, inner in table.model_fields.items()]
        elif name != "algorithm":
            lines.append(_row(name, info))
    lines += ["", "## Hyper-parameters", "", "| algorithm | field | type | default |", "|---|---|---|---|"]
    for name, cls in REGISTRY.items():
        for field, info in getattr(cls, "__pydantic_fields__", {}).items():
            lines.append(f"| [{cls.title}](algorithms/{name}.md) {_row(f'algorithm.{field}', info)}")
    return "\n".join(lines)


def _table_of(annotation: Any) -> Any:
    candidates = [annotation, *get_args(annotation)]
    return next((each for each in candidates if hasattr(each, "model_fields")), None)


def _row(name: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else "none" if info.default is None else f"`{info.default!r}`"
    kind = "; ".join([_kind(info.annotation), *_bounds(info.metadata)])
    return f"| `{name}` | {kind} | {default} |".replace("'", '"')


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = list(_bounds(arguments[1:]))
        return _kind(arguments[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in arguments if each is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value!r}`" for value in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), re.sub(r"^.*\.", "", str(annotation))
    )


def _bounds(metadata: Any) -> Iterator[str]:
    for entry in metadata:
        for part in getattr(entry, "metadata", None) or [entry]:
            for name, text in BOUNDS.items():
                if (value := getattr(part, name, None)) is not None:
                    yield text.format(f"{value:g}")
