"""Objects that are passed in Python instead of being named in a spec: the model, the data, the metrics and others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from keel.algorithms import Algorithm, check_functions
from keel.config.defaults import check_names, make_spec, without_none
from keel.config.overrides import read_spec
from keel.config.schema import CUSTOM, LocalSpec, Spec, algorithm_table
from keel.config.values import check_values
from keel.core.examples import FederatedData
from keel.core.records import Environment
from keel.errors import KeelError, shown
from keel.runs.build import check_sampler
from keel.runs.folder import RunFolder

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
    "model": _Place("model", allowed=frozenset({"buffers", "init"})),
    "data": _Place("data"),
    "algorithm": _Place("algorithm"),
    "sampler": _Place("participation", "sampler"),
    "engine": _Place("engine", allowed=frozenset({"device", "layout", "workers"})),
    "optimizer": _Place("local", "optimizer", allowed=frozenset({*LocalSpec.model_fields} - {"optimizer"})),
}
ARGUMENTS = ("model", "data", "algorithm", "loss", "metrics", "sampler", "engine", "optimizer")
"""The arguments of keel.run and keel.resume that may be objects."""
NAMES = {"loss": ("local", "loss"), "metrics": ("evaluation", "metrics"), "optimizer": ("local", "optimizer")}
"""The fields of arguments that may also be names. The environment records whether objects were passed."""
KINDS = {"model": nn.Module, "data": FederatedData, "algorithm": Algorithm}


def by_name(*objects: Any) -> Passed:
    """The objects, given in the order of ARGUMENTS, by name."""
    return dict(zip(ARGUMENTS, objects, strict=True))


def spec_of(spec: Spec | Mapping[str, Any] | str | Path | None, passed: Passed) -> Spec:
    """The spec, in which "custom" names what is passed.

    Raises:
        KeelError: An object has the wrong type, or the spec also sets a field that it replaces.
    """
    for name, kind in KINDS.items():
        if not isinstance(passed[name], kind | None):
            raise KeelError(f"{name} must be an instance of {kind.__name__} (got {type(passed[name]).__name__})")
    if passed["algorithm"] is not None and not isinstance(getattr(passed["algorithm"], "name", None), str):
        raise KeelError(
            f"algorithm must have a name: set the class attribute name of {type(passed['algorithm']).__name__}"
        )
    if passed["algorithm"] is not None:
        check_functions(type(passed["algorithm"]))  # type: ignore[arg-type]  # a class is hashable
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
        table = read_spec(Path(spec)) if isinstance(spec, str | Path) else _given_table(spec)
        table = without_none(table)
        check_names(table)
    for name, value in passed.items():
        if value is not None and name in NAMES and (name not in PLACES or _are_names(value)):
            table = _named(table, name, value)
        elif value is not None:
            table = _replaced(table, name, value)
    return table


def _given_table(spec: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(spec, Mapping | None):
        raise KeelError(f"spec must be a keel.Spec, a table or a path (got {shown(spec)})")
    check_values(spec or {})
    return dict(spec or {})


def check_varied(fields: Iterable[str], passed: Passed) -> None:
    """Raise a KeelError if a field that varies between runs is one that an object replaces."""
    replaced = {name: (place.section, place.allowed) for name, place in PLACES.items()}
    for field in fields:
        section, _, rest = field.partition(".")
        names = [name for name, (table, allowed) in replaced.items() if section == table and rest not in allowed]
        names += [name for name, place in NAMES.items() if (section, rest) == place]
        for name in names:
            if passed.get(name) is not None:
                raise KeelError(f"over: {field} conflicts with {name}=, which replaces it; remove one of them")


def objects_only(value: Any) -> Any:
    """The argument `loss`, `metrics` or `optimizer`; None if it consists of names, which the spec has."""
    return None if _are_names(value) else value


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))


def _named(table: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The table with the names that are passed. Objects are not named in it."""
    section, field = NAMES[name]
    fields = table.get(section, {})
    named = _are_names(value)
    if named and name == "metrics":
        value = [value] if isinstance(value, str) else list(value)
    if fields.get(field) is not None and not (named and fields[field] == value):
        raise KeelError(
            f"{section}.{field} = {fields[field]!r} conflicts with {name}=, which replaces it; remove one of them"
        )
    return {**table, section: {**fields, field: value}} if named else table


def check_resumed(passed: Passed, folder: RunFolder) -> None:
    """Raise a KeelError unless what is passed to keel.resume is what was passed to keel.run."""
    table, environment = folder.table, folder.environment
    recorded = {name: _recorded(name, table, environment) for name in passed}
    started_with = [name for name, reference in recorded.items() if reference == CUSTOM]
    missing = [name for name in started_with if passed[name] is None]
    if missing:
        arguments = ", ".join(f"{name}=..." for name in started_with)
        names = " and ".join([*([", ".join(missing[:-1])] if missing[:-1] else []), missing[-1]])
        raise KeelError(
            f"this run was started in Python: pass {names} again, with keel.resume({str(folder.path)!r}, {arguments})"
        )
    if recorded.get("metrics") == CUSTOM and _are_names(passed["metrics"]):
        raise KeelError("metrics were passed as objects when this run started; pass the same objects again")
    if recorded.get("optimizer") == CUSTOM and _are_names(passed["optimizer"]):
        raise KeelError("optimizer was passed as an object when this run started; pass the same object again")
    for name in ("sampler", "engine", "optimizer"):
        if passed[name] not in (None, recorded[name]) and recorded[name] != CUSTOM:
            raise KeelError(f"{name} was not passed when this run started (it used {recorded[name]!r}); leave it out")
    algorithm = passed["algorithm"]
    if algorithm is not None:
        started, resumed = (table["algorithm"], environment.get("algorithm_class")), algorithm_identity(algorithm)
        if started[0] != resumed[0] or started[1] not in (None, resumed[1]):
            raise KeelError(
                f"algorithm must be {started[1]} with {started[0]}, as when the run started "
                f"(got {resumed[1]} with {resumed[0]})"
            )


def _recorded(name: str, table: Mapping[str, Any], environment: Environment) -> str | None:
    """What the run used: a name, or "custom" for an object that was passed."""
    if name in NAMES and name not in PLACES:
        section, field = NAMES[name]
        return environment.get(name) if table.get(section, {}).get(field) is None else None  # type: ignore[return-value]
    place = PLACES[name]
    return table.get(place.section, {}).get(place.field)


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
        value = passed.get(name)
        if value is not None and not (name in NAMES and _are_names(value)):
            rest = {section: value for section, value in table.items() if section != place.section}
            default = make_spec(rest).model_dump()[place.section]
            fields = full[place.section]
            kept = {*place.allowed, *([place.field] if fields.get(place.field) == CUSTOM else [])}
            replaced = {key: value for key, value in fields.items() if key not in kept}
            if all(default.get(key) == value for key, value in replaced.items()):
                table[place.section] = {key: value for key, value in fields.items() if key in place.allowed}
    return {key: value for key, value in table.items() if value != {}}
