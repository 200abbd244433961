"""A spec: the whole experiment as a table of settings, checked, with defaults that suit the data and the algorithm."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from keel.algorithms import REGISTRY, Algorithm, make_algorithm
from keel.buffers import BufferPolicy
from keel.data.catalog import CATALOG
from keel.data.partition import Way
from keel.data.preparation import Layout
from keel.errors import KeelError, explain, unknown
from keel.memories import Precision
from keel.models import MODELS
from keel.network import Network
from keel.schedules import Schedule
from keel.settings import check_settings, paths

NO_PART = ("network", "tracking")
"""Tables that say nothing about what is computed: who is told, and what is made of the times."""
CUSTOM = "custom"
"""The name of data, a model or an algorithm that was passed as a Python object and cannot be found by name."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


class DataSpec(_Table):
    model_config = ConfigDict(extra="allow")
    name: str = "digits"
    clients: Count | None = None
    partition: Way | None = None
    alpha: Annotated[float, Field(ge=0)] | None = None
    min_examples: Count | None = None
    max_examples: Count | None = None
    test_examples: Count | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What this data set alone has: files, lengths, vocabularies."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self) -> "DataSpec":
        if self.name == CUSTOM:  # it comes dealt out
            return self
        if self.alpha is not None and self.partition != "dirichlet":
            raise ValueError(f"alpha goes with partition = 'dirichlet', not {self.partition!r}")
        if self.name not in CATALOG:
            raise unknown("data.name", self.name, CATALOG)
        check_settings("data", self.name, CATALOG[self.name].load, self.settings, DataSpec.model_fields)
        if self.partition == "key" and not CATALOG[self.name].natural:
            raise ValueError(f"{self.name} has no natural key; accepted partitions: 'dirichlet', 'iid'")
        if self.clients is None and self.partition != "key":
            raise ValueError("needs clients, a number (--clients)")
        return self


def split_of(data: DataSpec) -> str:
    """How the examples came to their clients, in words that follow the set's name."""
    match data.partition:
        case "dirichlet":
            return f" (alpha = {data.alpha:g})"
        case "iid":
            return " (IID)"
        case "key":
            return " (natural clients)"
        case _:
            return ""


class ModelSpec(_Table):
    model_config = ConfigDict(extra="allow")
    name: str = "mlp"
    buffers: BufferPolicy | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What this model alone has: widths, pretrained weights."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self) -> "ModelSpec":
        if self.name != CUSTOM:
            if self.name not in MODELS:
                raise unknown("model.name", self.name, MODELS)
            check_settings("model", self.name, MODELS[self.name], self.settings, ModelSpec.model_fields)
        return self


class LocalSpec(_Table):
    epochs: Count | None = None
    steps: Count | None = None
    batch: Count = 32
    drop_last: bool = False
    lr: Positive = 0.1
    schedule: Schedule = "constant"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.998
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Positive | None = None

    @model_validator(mode="after")
    def _one_measure_of_work(self) -> "LocalSpec":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs one of epochs and steps, and not both")
        return self


class ServerSpec(_Table):
    lr: Positive = 1.0
    schedule: Schedule = "constant"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.998
    weighting: Literal["examples", "uniform"] = "examples"


class ParticipationSpec(_Table):
    rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    sampler: Literal["uniform", "cyclic", "weighted"] = "uniform"


class EvaluationSpec(_Table):
    every: Count = 10
    last: Count = 100
    on: Literal["test", "validation"] = "test"
    drift: bool = False
    deviation: list[Count] = []

    def due(self, round: int, rounds: int) -> bool:
        """Whether the model is evaluated after this round of so many."""
        return round % self.every == 0 or round > rounds - self.last


class EngineSpec(_Table):
    name: Literal["auto", "serial", "cohort", "pool", "ray"] = "auto"
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    layout: Layout | None = None
    compile: bool = False
    address: Annotated[str, Field(min_length=1)] | None = None
    gpus: Annotated[float, Field(gt=0)] | None = None

    @property
    def on_ray(self) -> bool:
        return self.name == "ray" or self.address is not None

    @property
    def where(self) -> str:
        """The device that clients train on: on Ray that which is asked for, since this process need not have it."""
        return ("cuda" if self.gpus else "cpu") if self.on_ray else self.device

    @model_validator(mode="after")
    def _of_ray(self) -> "EngineSpec":
        if self.address is not None and self.name in ("serial", "pool"):
            raise ValueError(f"address goes with name = 'ray', 'cohort' or 'auto', not {self.name!r}")
        if self.gpus is not None and not self.on_ray:
            raise ValueError("gpus goes with name = 'ray' or an address: elsewhere the device is one for all clients")
        if self.on_ray and self.device not in ("auto", self.where):
            raise ValueError(f"device {self.device!r} on Ray; accepted: 'cuda' with gpus, 'cpu' without")
        return self


def engine_bits(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What of an engine can change a result: neither who computes nor where, as long as the arithmetic is the same."""
    kept = {key: value for key, value in engine.items() if key not in ("workers", "address", "gpus")}
    kept["name"] = "serial" if engine["name"] in ("serial", "pool", "ray") else engine["name"]
    return {**kept, "device": "cuda"} if engine.get("gpus") else kept


class MemorySpec(_Table):
    ram_gb: Positive = 4.0
    precision: Precision = "float32"
    keep: Count | None = None


class TrackingSpec(_Table):
    to: list[Literal["tensorboard", "wandb", "mlflow"]] = []
    project: Annotated[str, Field(min_length=1)] = "keel"
    wandb_mode: Literal["online", "offline"] | None = None


def _algorithm(value: Any) -> Algorithm:
    if isinstance(value, Algorithm):
        return value
    if not isinstance(value.get("name"), str):
        raise ValueError("needs a name, as text")
    return make_algorithm(**value)


def _algorithm_table(algorithm: Algorithm) -> dict[str, Any]:
    cls = type(algorithm)
    importable = cls.__module__ != "__main__" and cls.__qualname__ == cls.__name__
    own = f"{cls.__module__}:{cls.__name__}" if importable else CUSTOM
    name = cls.name if cls.__module__.startswith("keel.") else own
    return {"name": name, **{k: v for k, v in algorithm.settings().items() if v is not None}}


AlgorithmField = Annotated[Algorithm, BeforeValidator(_algorithm), PlainSerializer(_algorithm_table)]


class Spec(_Table):
    """One experiment. Equal specs give equal bits."""

    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Count = 400
    algorithm: AlgorithmField
    data: DataSpec
    model: ModelSpec
    local: LocalSpec
    server: ServerSpec
    participation: ParticipationSpec
    evaluation: EvaluationSpec
    engine: EngineSpec
    memory: MemorySpec
    network: Network | None = None
    tracking: TrackingSpec = TrackingSpec()

    @property
    def experiment(self) -> dict[str, Any]:
        """All of it but what may differ between two starts of one run, which changes none of its bits."""
        no_part: dict[str, Any] = {**dict.fromkeys(NO_PART, True), "engine": {"workers"}}
        return self.model_dump(exclude_none=True, exclude=no_part)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two runs the same: the experiment, however it is shared out."""
        table = self.experiment
        return {**table, "engine": engine_bits(table["engine"])}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @property
    def label(self) -> str:
        """A short telling name: what is trained, by what, from which seed."""
        algorithm = _algorithm_table(self.algorithm)["name"].split(":")[-1].lower()
        return f"{self.data.name}-{self.model.name}-{algorithm}-seed{self.seed}"


def make_spec(table: Mapping[str, Any]) -> Spec:
    """The spec that `table` describes, the rest filled in; a mistake is a KeelError of one line."""
    table = _given(table)
    check_names(table)
    full = merge(*_default_layers(table), table)
    _settle(full, table)
    return resolved_spec(full)


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields that are None, which is how Python says that they are not given."""
    return {
        key: _given(value) if isinstance(value, Mapping) else value for key, value in table.items() if value is not None
    }


def resolved_spec(table: Mapping[str, Any]) -> Spec:
    """The spec that a resolved table is, as it stands: nothing is filled in."""
    try:
        return Spec.model_validate(table)
    except ValidationError as error:
        raise KeelError(explain(error)) from None


def read_spec(path: Path) -> dict[str, Any]:
    """The table in a TOML file, not yet checked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KeelError(f"spec: no file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KeelError(f"spec: {str(path)!r} cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise KeelError(f"spec: {str(path)!r} is not TOML ({error})") from None


def override(table: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`table` with each "key.of.field=value" put in; a value that is not TOML is taken as text."""
    result = merge(table)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not (equals and key):
            raise KeelError(f"--set: {assignment!r}; accepted: key=value, as in local.lr=0.03")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        try:
            put(result, key, value)
        except KeelError as error:
            raise KeelError(f"--set: {error}") from None
    return result


def read_network(assignments: Iterable[str]) -> Network:
    """The network that "field=value" texts describe."""
    table = override({}, assignments)
    check_names({"network": table})
    try:
        return Network.model_validate(table)
    except ValidationError as error:
        raise KeelError(f"network.{explain(error)}") from None


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every field under its dotted name, as `--set` takes it."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Gives the field "key.of.field" of `table` this value."""
    *tables, field = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise KeelError(f"{key}: {name} is a field, not a table")
    table[field] = value


@cache
def defaults() -> dict[str, Any]:
    """Defaults by data set and algorithm, as kept in defaults.toml."""
    return tomllib.loads(files(__package__).joinpath("defaults.toml").read_text(encoding="utf-8"))


def _default_layers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is given by default for this data set, then for the algorithm, then for the model, then for both."""
    data = table.get("data", {}).get("name", "digits")
    algorithm = table.get("algorithm", {"name": "ghbm"})
    name = algorithm.name if isinstance(algorithm, Algorithm) else algorithm.get("name", "ghbm")
    known = defaults()
    layers = [known["any"]]
    if isinstance(data, str) and data in known:
        layers += [known[name] for name in (known[data].get("like"), data) if name is not None]
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


def _settle(full: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Defaults that depend on what else was given."""
    given_local = given.get("local", {})
    if "steps" in given_local and "epochs" not in given_local:
        full["local"].pop("epochs", None)
    rounds = full.get("rounds", Spec.model_fields["rounds"].default)
    if "last" not in given.get("evaluation", {}) and isinstance(rounds, int):
        most = full["evaluation"].get("last", EvaluationSpec.model_fields["last"].default)
        full["evaluation"]["last"] = min(most, max(1, rounds // 3))  # the last rounds of a short run are fewer
    if full["participation"].get("sampler") == "weighted" and "weighting" not in given.get("server", {}):
        full["server"]["weighting"] = "uniform"  # chances by size already weigh the clients
    given_data = given.get("data", {})
    data = full["data"]
    if data.get("name") == CUSTOM:
        for field in ("partition", "alpha", "clients"):
            data.pop(field, None)
    else:
        if "partition" not in given_data and "alpha" in given_data:
            data["partition"] = "dirichlet"
        data.setdefault("partition", "key" if "keys" in given_data else "dirichlet")
        if data["partition"] == "dirichlet":
            data.setdefault("alpha", 0.0)
        elif "alpha" not in given_data:
            data.pop("alpha", None)
    if full["data"].get("partition") != "key" and "min_examples" not in given.get("data", {}):
        full["data"].pop("min_examples", None)  # which goes with natural clients
    for section, field in _path_fields(full):
        if Path(path := full[section][field]).exists():
            full[section][field] = str(Path(path).absolute())  # so that a resume finds it from any folder


def _path_fields(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings of the data set and of the model that are paths, and given."""
    loaders: dict[str, Mapping[str, Any]] = {
        "data": {name: entry.load for name, entry in CATALOG.items()},
        "model": MODELS,
    }
    found = []
    for section, known in loaders.items():
        given = table[section]
        fields = paths(known[given["name"]]) if given.get("name") in known else []
        found += [(section, field) for field in fields if isinstance(given.get(field), str)]
    return found


def files_of(table: Mapping[str, Any]) -> list[str]:
    """The files of the user's own that a resolved table names."""
    return [table[section][field] for section, field in _path_fields(table)]


def assignments(table: Mapping[str, Any]) -> list[str]:
    """What `override` makes a resolved table of again: "key=value" for all that is not so by default.

    No code that the table names is imported: where the algorithm is a user's own, all fields are there.
    """
    table = {section: value for section, value in table.items() if section not in NO_PART}
    given = flatten(table)
    if table["algorithm"]["name"] in REGISTRY:
        for field in given:
            rest = {key: value for key, value in given.items() if key != field}
            if _makes(rest, table):
                given = rest
    return [f"{key}={_as_text(value)}" for key, value in given.items()]


def _makes(fields: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    """Whether these fields are enough for a spec that resolves to `table`."""
    given: dict[str, Any] = {}
    for key, value in fields.items():
        put(given, key, value)
    try:
        return flatten(make_spec(given).experiment) == flatten(table)
    except KeelError:
        return False


def _as_text(value: Any) -> str:
    """As `override` reads it: JSON is TOML here, and text that is no TOML stands for itself."""
    whole = json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and override({}, [f"value={value}"])["value"] == value else whole


def check_names(table: Mapping[str, Any]) -> None:
    """Every table and field is one that exists; the nearest one is named otherwise."""
    for section, value in table.items():
        if section not in Spec.model_fields:
            raise unknown("spec", section, Spec.model_fields)
        kind = Network if section == "network" else Spec.model_fields[section].annotation
        if isinstance(value, Algorithm) or not (isinstance(kind, type) and issubclass(kind, BaseModel | Algorithm)):
            continue
        if not isinstance(value, Mapping):
            raise KeelError(f"{section}: {value!r} is not a table; accepted: [{section}] with its fields below it")
        if (
            issubclass(kind, BaseModel) and kind.model_config.get("extra") == "forbid"
        ):  # the others depend on their name
            for field in value:
                if field not in kind.model_fields:
                    raise unknown(section, field, kind.model_fields)


def merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables as one, later ones over earlier ones, field by field; none of them is changed."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            if isinstance(value, Mapping):
                below = merged.get(key, {})
                merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
            else:
                merged[key] = value
    return merged
