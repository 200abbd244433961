"""Defaults that suit the data set, the model and the algorithm, and the spec that a partial table describes."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from keel import models
from keel.algorithms import REGISTRY, Algorithm
from keel.config.overrides import flatten, merge, override, put
from keel.config.schema import (
    CUSTOM,
    EvaluationSpec,
    LocalSpec,
    Spec,
    check_without_imports,
    last_rounds,
    not_computed,
    resolved_spec,
    with_current_names,
)
from keel.config.values import check_values
from keel.core.optimizer_names import OPTIMIZERS
from keel.core.sampling import SAMPLERS
from keel.data import catalog
from keel.data.schemes import SHARDS_PER_CLIENT, implied_by
from keel.engines import AUTO, ENGINES
from keel.errors import KeelError, shown, unknown_name
from keel.settings import paths


def make_spec(table: Mapping[str, Any]) -> Spec:
    """The spec that `table` describes, completed by defaults.

    Raises:
        KeelError: A table, field or value is not valid; the message is one line.
    """
    full = completed(table)
    for section, field in _path_fields(full):
        try:
            if Path(path := full[section][field]).exists():
                full[section][field] = str(Path(path).absolute())  # so that a resume finds it from any folder
        except OSError as error:  # a name that no file can have
            raise KeelError(f"{section}.{field} must be a path ({error.strerror}; got {shown(path)})") from None
    return resolved_spec(full)


def completed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table completed by defaults, checked as far as possible before PyTorch is imported.

    Raises:
        KeelError: A table, field, name or value is not valid; the message is one line.
    """
    check_values(table)
    table = with_current_names(without_none(table))
    check_names(table)
    layers = _default_layers(table)
    full = merge(*layers, table)
    _adjust(full, table, merge(*layers))
    check_without_imports(full)
    return full


def check_names(table: Mapping[str, Any]) -> None:
    """Raise a KeelError that suggests the nearest name if a table or field does not exist."""
    for section, value in table.items():
        if section not in Spec.model_fields:
            raise unknown_name("spec field", section, Spec.model_fields)
        kind = _table_type(Spec.model_fields[section].annotation)
        if isinstance(value, Algorithm) or not (isinstance(kind, type) and issubclass(kind, BaseModel | Algorithm)):
            continue
        if not isinstance(value, Mapping):
            raise KeelError(
                f"{section} must be a table (got {shown(value)}); write [{section}] with its fields below it"
            )
        if issubclass(kind, BaseModel) and kind.model_config.get("extra") == "forbid":  # others depend on their name
            for field in value:
                if field not in kind.model_fields:
                    raise unknown_name(f"{section} field", field, kind.model_fields)


def _table_type(annotation: Any) -> Any:
    """The type of a field of the spec; of an optional table, the type of the table."""
    return next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)


def user_files(table: Mapping[str, Any]) -> list[str]:
    """The user's files that a resolved table names. No code that it names is imported."""
    return [table[section][field] for section, field in _path_fields(table, import_code=False)]


def assignments(table: Mapping[str, Any], near: tuple[Mapping[str, Any], Iterable[str]] | None = None) -> list[str]:
    """The "key=value" texts from which `override` and `make_spec` restore a resolved table: all that is not a default.

    No code that the table names is imported: where it names a user's code, all fields are listed.

    Args:
        near: A similar table and the fields that are not defaults in it. If these, and those in which the tables
            differ, restore the table, they are listed, which is found many times faster.
    """
    table = {section: value for section, value in table.items() if section not in not_computed(table)}
    fields = flatten(table)
    builtin = {"algorithm": REGISTRY, "data": {CUSTOM, *catalog.CATALOG}, "model": {CUSTOM, *models.MODELS}}
    builtin["engine"] = {AUTO, CUSTOM, *ENGINES}
    known_sampler = table["participation"].get("sampler", CUSTOM) in {CUSTOM, *SAMPLERS}
    if known_sampler and all(table[section]["name"] in names for section, names in builtin.items()):
        fields = _enough(fields, table, near)
    return [f"{key}={_as_text(value)}" for key, value in fields.items()]


def _enough(
    fields: dict[str, Any], table: Mapping[str, Any], near: tuple[Mapping[str, Any], Iterable[str]] | None
) -> dict[str, Any]:
    """The fields from which `make_spec` restores the table, without those that the others imply."""
    other, listed = near or _defaults_of(table)
    flat, kept = flatten(other), set(listed)
    some = {k: v for k, v in fields.items() if k in kept or k not in flat or flat[k] != v}
    if _suffices(some, table):
        fields = some
        if near is not None:
            return fields
    for field in fields:
        rest = {key: value for key, value in fields.items() if key != field}
        if _suffices(rest, table):
            fields = rest
    return fields


def _defaults_of(table: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The spec of the same algorithm, data set and model with defaults for all else, and these three fields."""
    named = {section: {"name": table[section]["name"]} for section in ("algorithm", "data", "model")}
    try:
        return make_spec(named).experiment, list(flatten(named))
    except KeelError:  # some have fields without a default
        return {}, []


@cache
def defaults() -> dict[str, Any]:
    """The content of defaults.toml: defaults by data set, model and algorithm."""
    return tomllib.loads(files(__package__).joinpath("defaults.toml").read_text(encoding="utf-8"))


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without fields that are None, which is how Python leaves one out, and with lists for tuples."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}
    return {
        key: without_none(value) if isinstance(value, Mapping) else value
        for key, value in plain.items()
        if value is not None
    }


def _default_layers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The defaults of the data set, then of the algorithm on it, then of the model, then of the algorithm on both."""
    data = table.get("data", {}).get("name", "digits")
    algorithm = table.get("algorithm", {"name": "ghbm"})
    name = algorithm.name if isinstance(algorithm, Algorithm) else algorithm.get("name", "ghbm")
    content = defaults()
    layers = [content["any"]]
    if isinstance(data, str) and data in content:
        layers += [content[name] for name in (content[data].get("like"), data) if name is not None]
    model = table.get("model", {}).get("name") or next(
        (layer["model"]["name"] for layer in reversed(layers) if "model" in layer), None
    )
    of_model = [layer["on"][model] for layer in layers if isinstance(model, str) and model in layer.get("on", {})]
    every: dict[str, Any] = {section: {} for section, field in Spec.model_fields.items() if field.is_required()}
    result = [every]
    for group in (layers, of_model):
        result += [{k: v for k, v in layer.items() if k not in ("like", "with", "on")} for layer in group]
        result += [layer["with"][name] for layer in group if isinstance(name, str) and name in layer.get("with", {})]
    return result


def _adjust(full: dict[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Apply defaults that depend on which other fields are given."""
    given_local = given.get("local", {})
    if "steps" in given_local and "epochs" not in given_local:
        full["local"].pop("epochs", None)
    default = defaults["local"].get("optimizer", LocalSpec.model_fields["optimizer"].default)
    optimizer = given_local.get("optimizer", default)
    if optimizer != default:  # the other defaults are for another one
        if "lr" not in given_local and isinstance(optimizer, str) and optimizer in OPTIMIZERS:
            full["local"]["lr"] = OPTIMIZERS[optimizer].lr
        settings = [field for field in full["local"] if field not in {*LocalSpec.model_fields, *given_local}]
        for setting in settings:
            del full["local"][setting]
    rounds = full.get("rounds", Spec.model_fields["rounds"].default)
    if "last" not in given.get("evaluation", {}) and isinstance(rounds, int):
        most = full["evaluation"].get("last", EvaluationSpec.model_fields["last"].default)
        full["evaluation"]["last"] = last_rounds(most, rounds)
    if full["participation"].get("sampler") == "weighted" and "weighting" not in given.get("server", {}):
        full["server"]["weighting"] = "uniform"  # the sampling probabilities already weight the clients
    privacy = full.get("privacy")
    of_clients = isinstance(privacy, Mapping) and privacy.get("mechanism") != "example"
    if of_clients and "weighting" not in given.get("server", {}):
        full["server"]["weighting"] = "uniform"  # so that every client has the same influence
    _adjust_data(full["data"], given.get("data", {}))


def _adjust_data(data: dict[str, Any], given: Mapping[str, Any]) -> None:
    if data.get("name") == CUSTOM:
        for field in ("partition", "alpha", "clients"):
            data.pop(field, None)
    else:
        if "partition" not in given and (implied := implied_by(given)):
            data["partition"] = implied
        data.setdefault("partition", catalog.default_scheme(data.get("name"), given))
        if data["partition"] == "dirichlet":
            data.setdefault("alpha", 0.0)
        elif "alpha" not in given:
            data.pop("alpha", None)
        if data["partition"] == "shards":
            data.setdefault("shards_per_client", SHARDS_PER_CLIENT)
    if data.get("partition") != "key" and "min_examples" not in given:
        data.pop("min_examples", None)  # the defaults are for natural clients


def _path_fields(table: Mapping[str, Any], *, import_code: bool = True) -> list[tuple[str, str]]:
    """The given fields and settings of the data set and of the model that are paths."""
    finders: dict[str, tuple[Iterable[str], Callable[[str], Callable[..., Any]]]] = {
        "data": (catalog.CATALOG, lambda name: catalog.find(name).load),
        "model": (models.MODELS, models.find),
    }
    fields = [("model", "init")] if isinstance(table["model"].get("init"), str) else []
    for section, (builtin, find) in finders.items():
        settings, name = table[section], table[section].get("name", CUSTOM)
        if isinstance(name, str) and (name in builtin or (import_code and name != CUSTOM)):
            fields += [(section, field) for field in paths(find(name)) if isinstance(settings.get(field), str)]
    return fields


def _suffices(fields: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    """Whether a spec with only these fields resolves to `table`."""
    given: dict[str, Any] = {}
    try:
        for key, value in fields.items():
            put(given, key, value)
        return flatten(make_spec(given).experiment) == flatten(table)
    except KeelError:
        return False


def _as_text(value: Any) -> str:
    """The value as `override` reads it: JSON is TOML here, and text that is not TOML needs no quotes."""
    whole = json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and override({}, [f"value={value}"])["value"] == value else whole
