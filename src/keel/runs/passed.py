"""Objects that are passed in Python instead of being named in a spec: model, data, algorithm, loss, sampler, engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from keel.algorithms import Algorithm
from keel.config.defaults import check_names, make_spec, without_none
from keel.config.overrides import put, read_spec
from keel.config.schema import CUSTOM, Spec, algorithm_table
from keel.core.examples import FederatedData
from keel.core.records import Environment
from keel.errors import KeelError, explain, unknown_name
from keel.runs.build import check_sampler

Passed = Mapping[str, Any]
"""The arguments of keel.run by name; None for those that were not passed."""


@dataclass(frozen=True)
class _Place:
    """The field of a spec that an object replaces."""

    section: str
    field: str = "name"
    allowed: frozenset[str] = frozenset()
    """The other fields of the table that still apply."""


PLACES = {
    "model": _Place("model", allowed=frozenset({"buffers"})),
    "data": _Place("data"),
    "algorithm": _Place("algorithm"),
    "sampler": _Place("participation", "sampler"),
    "engine": _Place("engine", allowed=frozenset({"device", "layout", "workers"})),
}
KINDS = {"model": nn.Module, "data": FederatedData, "algorithm": Algorithm}


def spec_of(spec: Spec | Mapping[str, Any] | str | Path | None, passed: Passed) -> Spec:
    """The spec, in which "custom" names what is passed.

    Raises:
        KeelError: An object has the wrong type, or the spec also sets a field that it replaces.
    """
    for name, kind in KINDS.items():
        if not isinstance(passed[name], kind | None):
            raise KeelError(f"{name} must be an instance of {kind.__name__} (got {type(passed[name]).__name__})")
    if passed["sampler"] is not None:
        check_sampler(passed["sampler"])
    if isinstance(spec, Spec) and all(value is None for value in passed.values()):
        return spec
    return make_spec(table_of(spec, passed))


def table_of(spec: Spec | Mapping[str, Any] | str | Path | None, passed: Passed) -> dict[str, Any]:
    """The spec as a table without further defaults, in which "custom" names what is passed.

    Raises:
        KeelError: The spec sets a field that an object replaces.
    """
    if isinstance(spec, Spec):
        table = _without_defaults(spec, passed)
    else:
        table = without_none(read_spec(Path(spec)) if isinstance(spec, str | Path) else dict(spec or {}))
        check_names(table)
    for name, value in passed.items():
        if value is not None and name in PLACES:
            table = _replaced(table, name, value)
    return table


def check_varied(fields: Iterable[str], passed: Passed) -> None:
    """Raise a KeelError if a field that varies between runs is one that an object replaces."""
    for name, place in PLACES.items():
        for field in fields:
            section, _, rest = field.partition(".")
            if passed.get(name) is not None and section == place.section and rest not in place.allowed:
                raise KeelError(f"over: {field} conflicts with {name}=, which replaces it; remove one of them")


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


def check_resumed(passed: Passed, table: Mapping[str, Any], environment: Environment) -> None:
    """Raise a KeelError unless what is passed to keel.resume is what was passed to keel.run."""
    for name, value in passed.items():
        place = PLACES.get(name)
        recorded = environment["loss"] if place is None else table[place.section].get(place.field)
        if value is None and recorded == CUSTOM:
            raise KeelError(f"{name} was passed in Python when this run started; use keel.resume(..., {name}=...)")
        if value is not None and recorded != CUSTOM and name in ("sampler", "engine"):
            raise KeelError(f"{name} was not passed when this run started (it used {recorded!r}); leave it out")
    algorithm = passed["algorithm"]
    if algorithm is not None:
        started, resumed = (table["algorithm"], environment.get("algorithm_class")), algorithm_identity(algorithm)
        if started[0] != resumed[0] or started[1] not in (None, resumed[1]):
            raise KeelError(
                f"algorithm must be {started[1]} with {started[0]}, as when the run started "
                f"(got {resumed[1]} with {resumed[0]})"
            )


def algorithm_identity(algorithm: Algorithm) -> tuple[dict[str, Any], str]:
    """The algorithm's table in a spec, and its class."""
    cls = type(algorithm)
    return algorithm_table(algorithm), f"{cls.__module__}:{cls.__qualname__}"


def _replaced(table: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The table in which "custom" names the object."""
    place = PLACES[name]
    fields = table.get(place.section, {})
    if isinstance(fields, Algorithm):
        raise KeelError(f"algorithm {fields.name!r} of the spec conflicts with algorithm=; remove one of them")
    set_fields = {key: v for key, v in fields.items() if key not in place.allowed and (key, v) != (place.field, CUSTOM)}
    if name == "sampler" and fields.get("sampler") == CUSTOM:
        set_fields.pop("rate", None)  # of an earlier run with a passed sampler
    for key, v in set_fields.items():
        raise KeelError(f"{place.section}.{key} = {v!r} conflicts with {name}=, which replaces it; remove one of them")
    if name == "algorithm":
        return {**table, "algorithm": value}
    new = {**fields, place.field: CUSTOM}
    if name == "sampler":
        new["rate"] = value.size / value.clients
    return {**table, place.section: new}


def _without_defaults(spec: Spec, passed: Passed) -> dict[str, Any]:
    """A Spec as a table, without the defaults of the fields that objects replace: the user did not set them."""
    full = spec.model_dump(exclude_none=True)
    table = {**full, "algorithm": spec.algorithm}  # which may have no name that can be imported
    for name, place in PLACES.items():
        if passed.get(name) is not None:
            rest = {section: value for section, value in table.items() if section != place.section}
            default = make_spec(rest).model_dump()[place.section]
            fields = full[place.section]
            kept = {*place.allowed, *([place.field] if fields.get(place.field) == CUSTOM else [])}
            replaced = {key: value for key, value in fields.items() if key not in kept}
            if all(default.get(key) == value for key, value in replaced.items()):
                table[place.section] = {key: value for key, value in fields.items() if key in place.allowed}
    return {key: value for key, value in table.items() if value != {}}
