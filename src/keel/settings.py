"""Settings of data sets and models: the keyword parameters of the functions that make them."""

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, isclass, signature
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from keel.errors import KeelError, explain, one_line, shown, unknown_name

PathText = Annotated[str, "path"]
"""A path in a spec, as text; an existing one is made absolute, so that a resume finds it from any folder."""

_CONFIG = ConfigDict(strict=True)


def check_settings(
    table: str, name: str, function: Callable[..., Any], settings: Mapping[str, Any], others: Iterable[str]
) -> None:
    """Raise a KeelError unless `settings` are parameters of the function.

    Their values are validated when the function is called.

    Args:
        others: The fields that the table has for every name, listed in an error.
    """
    accepted = _settings(function)
    for setting in settings:
        if setting not in accepted and not _takes_any(function):
            raise unknown_name(f"{table} field", setting, {*accepted, *others}, owner=name)
    missing = [s for s, parameter in accepted.items() if parameter.default is Parameter.empty and s not in settings]
    if missing:
        raise KeelError(f"{table}.{missing[0]} must be set for {table}.name = {name!r}")


def paths(function: Callable[..., Any]) -> list[str]:
    """The names of the settings that are paths."""
    try:
        hints = get_type_hints(function.__init__ if isclass(function) else function, include_extras=True)
    except Exception:  # annotations of a user's function may refer to names that do not exist at run time
        return []
    return [name for name in _settings(function) if _is_path(hints.get(name))]


def call(table: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call the function; a setting of the wrong type is a KeelError that names the spec's field."""
    try:
        return validate_call(config=_CONFIG)(function)(*arguments, **settings)
    except ValidationError as error:
        raise KeelError(explain(error, table)) from None


def call_imported(field: str, name: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a user's function; whatever it raises is a KeelError that names the spec's field."""
    try:
        return function(*arguments, **settings)
    except KeelError:
        raise
    except Exception as error:
        raise KeelError(f"{field}: {shown(name)} failed ({one_line(error)})") from error


def takes_shape_and_classes(function: Callable[..., Any]) -> bool:
    """Whether the first two positional parameters of a model's function are `input_shape` and `classes`."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [name for name, p in signature(function).parameters.items() if p.kind in positional]
    return parameters[:2] == ["input_shape", "classes"]


def _settings(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that a spec can give by keyword: all but the shape and the classes that Keel passes."""
    by_keyword = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = list(signature(function).parameters.items())[2 if takes_shape_and_classes(function) else 0 :]
    return {name: p for name, p in parameters if p.kind in by_keyword}


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is Parameter.VAR_KEYWORD for p in signature(function).parameters.values())


def _is_path(hint: Any) -> bool:
    return hint == PathText or any(_is_path(part) for part in get_args(hint))
