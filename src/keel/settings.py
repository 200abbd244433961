"""Settings of things that are made by a function and named in a spec: data sets and models."""

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from keel.errors import KeelError, explain, unknown

PathText = Annotated[str, "path"]
"""A path in a spec: text; one that exists is made absolute, so that a resume finds it from any folder."""

_CONFIG = ConfigDict(strict=True)


def check_settings(
    table: str, name: str, function: Callable[..., Any], settings: Mapping[str, Any], others: Iterable[str]
) -> None:
    """Whether these are the function's settings, beside the `others` that the table has for every name.

    That their values suit is found when it is called.
    """
    accepted = _settings(function)
    for setting in settings:
        if setting not in accepted:
            raise unknown(f"{table} ({name})", setting, {*accepted, *others})
    missing = [s for s, parameter in accepted.items() if parameter.default is Parameter.empty and s not in settings]
    if missing:
        raise KeelError(f"{table} ({name}): needs {', '.join(missing)}")


def paths(function: Callable[..., Any]) -> list[str]:
    """The settings that are paths."""
    hints = get_type_hints(function, include_extras=True)
    return [name for name in _settings(function) if _is_path(hints[name])]


def call(table: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """The function's result; settings of a wrong kind are a KeelError that names the spec's field."""
    try:
        return validate_call(config=_CONFIG)(function)(*arguments, **settings)
    except ValidationError as error:
        raise KeelError(explain(error, table)) from None


def _settings(function: Callable[..., Any]) -> dict[str, Parameter]:
    return {n: p for n, p in signature(function).parameters.items() if p.kind is Parameter.KEYWORD_ONLY}


def _is_path(hint: Any) -> bool:
    return hint == PathText or any(_is_path(part) for part in get_args(hint))
