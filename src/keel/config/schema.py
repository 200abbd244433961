"""The schema of a spec: every table and field of an experiment, with its type and its checks."""

from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from keel import algorithms, engines, models, registry
from keel.algorithms import Algorithm, keeps_state, make_algorithm
from keel.config.availability import AvailabilitySpec
from keel.config.compression import CompressionSpec
from keel.config.network import Network
from keel.core.choices import Autocast, BufferPolicy, Clip, Layout, Precision
from keel.core.optimizer_names import OptimizerState, check_optimizer
from keel.core.sampling import SAMPLERS
from keel.core.schedules import Schedule
from keel.data import catalog
from keel.data.schemes import SCHEMES_WITH, PartitionScheme, check_fields
from keel.errors import KeelError, explain, shown, unknown_name
from keel.privacy.settings import Mean, PrivacySpec, check_mean
from keel.settings import PathText, check_settings

CUSTOM = "custom"
"""The name of what was passed as a Python object and cannot be found by name."""

_WITHOUT_IMPORTS = {"imports": False}
"""The context of a validation that imports no algorithm, data set or model, and so not PyTorch."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def not_computed(table: Mapping[str, Any]) -> tuple[str, ...]:
    """The tables of a resolved spec that do not change what is computed. A deadline makes the network change it."""
    availability = table.get("availability") or {}
    return ("tracking",) if availability.get("deadline") is not None else ("network", "tracking")


def _none_if_empty(table: Any) -> Any:
    return None if table == {} else table


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


class DataSpec(_Table):
    model_config = ConfigDict(extra="allow")
    name: str = "digits"
    clients: Count | None = None
    partition: PartitionScheme | None = None
    alpha: Annotated[float, Field(ge=0)] | None = None
    classes_per_client: Count | None = None
    shards_per_client: Count | None = None
    noise: Positive | None = None
    min_examples: Count | None = None
    max_examples: Count | None = None
    test_examples: Count | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of this data set alone, such as files, lengths and vocabularies."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> "DataSpec":
        if self.name == CUSTOM:  # it is partitioned already
            return self
        registry.check_name("data.name", self.name, catalog.CATALOG, catalog.ENTRY_POINTS)
        check_fields(self.partition, {field: getattr(self, field) for field in SCHEMES_WITH})
        if info.context == _WITHOUT_IMPORTS:
            return self
        entry = catalog.find(self.name)
        check_settings("data", self.name, entry.load, self.settings, DataSpec.model_fields)
        if self.partition == "key" and entry.natural is False:
            raise ValueError(
                f"partition = 'key' requires natural clients, which {self.name} lacks; use 'dirichlet' or 'iid'"
            )
        if self.clients is None and self.partition != "key":
            raise ValueError("clients must be set (--clients), the number of clients to partition the examples over")
        return self


def partition_label(data: DataSpec) -> str:
    """The partitioning scheme, to be appended to the data set's name."""
    match data.partition:
        case "dirichlet":
            return f" (alpha = {data.alpha:g})"
        case "dirichlet_per_class":
            return f" (alpha = {data.alpha:g} per class)"
        case "classes":
            return f" (classes per client: {data.classes_per_client})"
        case "shards":
            return f" (shards per client: {data.shards_per_client})"
        case "quantity":
            return f" (quantity skew, alpha = {data.alpha:g})"
        case "feature":
            return f" (feature shift, noise = {data.noise:g})"
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
    init: PathText | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of this model alone, such as widths and pretrained weights."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> "ModelSpec":
        if self.name == CUSTOM:
            return self
        registry.check_name("model.name", self.name, models.MODELS, models.ENTRY_POINTS)
        if info.context != _WITHOUT_IMPORTS:
            check_settings("model", self.name, models.find(self.name), self.settings, ModelSpec.model_fields)
        return self


class LocalSpec(_Table):
    model_config = ConfigDict(extra="allow")
    epochs: Count | None = None
    steps: Count | None = None
    batch: Count = 32
    drop_last: bool = False
    lr: Positive = 0.1
    schedule: Schedule = "constant"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.998
    warmup: Annotated[int, Field(ge=0)] = 0
    optimizer: Annotated[str, Field(min_length=1)] = "sgd"
    optimizer_state: OptimizerState = "reset"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    decay_biases: bool = True
    clip: Positive | None = None
    precision: Autocast = "float32"
    microbatch: Count | None = None
    loss: Annotated[str, Field(min_length=1)] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of this optimiser alone, such as momentum and betas."""
        return dict(self.model_extra or {})

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a local step is w <- w - lr (u + weight_decay w)."""
        return self.optimizer == "sgd" and not any(self.settings.values())

    @model_validator(mode="after")
    def _known(self) -> "LocalSpec":
        if self.optimizer == CUSTOM and self.settings:
            raise unknown_name("local field", next(iter(self.settings)), LocalSpec.model_fields)
        if self.optimizer != CUSTOM:
            check_optimizer(self.optimizer, self.settings, LocalSpec.model_fields)
        return self

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> "LocalSpec":
        if (self.epochs is None) == (self.steps is None):
            got = f"epochs = {self.epochs}, steps = {self.steps}"
            raise KeelError(f"set either local.epochs or local.steps (got {got})")
        return self


def _checked_clip(value: Any) -> Any:
    """The clipping of reports; false, which TOML has for None, switches it off."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
    if value is not None and value is not False and value != "adaptive" and not number:
        raise KeelError(f"server.clip must be a positive number, 'adaptive' or false (got {shown(value)})")
    return None if value is False else value


class ServerSpec(_Table):
    lr: Positive = 1.0
    schedule: Schedule = "constant"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.998
    warmup: Annotated[int, Field(ge=0)] = 0
    weighting: Literal["examples", "uniform"] = "examples"
    largest_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    clip: Annotated[Clip | None, BeforeValidator(_checked_clip)] = None
    mean: Mean | None = None
    trim: Annotated[float, Field(gt=0, lt=0.5)] | None = None

    @model_validator(mode="after")
    def _trim_of_trimmed_mean(self) -> "ServerSpec":
        if self.trim is not None and self.mean != "trimmed_mean":
            raise ValueError(f"trim = {self.trim:g} requires mean = 'trimmed_mean' (got mean = {self.mean!r})")
        return self


class ParticipationSpec(_Table):
    rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    sampler: str = "uniform"

    def cohort_size(self, clients: int) -> int:
        """S, the number of clients in a round."""
        return max(1, round(self.rate * clients))

    @model_validator(mode="after")
    def _known(self) -> "ParticipationSpec":
        if self.sampler != CUSTOM:
            registry.find("participation.sampler", self.sampler, SAMPLERS, "keel.samplers")
        return self


def _as_list(value: Any) -> Any:
    """Names with commas between, as the command line has them, as a list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class EvaluationSpec(_Table):
    every: Count = 10
    last: Count = 100
    on: Literal["test", "validation"] = "test"
    metrics: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] | None = None
    maximize: bool | None = None
    clients: Count | None = None
    finetune_steps: Count | None = None
    select: bool | None = None
    drift: bool = False
    deviation: list[Count] = []

    @model_validator(mode="after")
    def _consistent(self) -> "EvaluationSpec":
        if self.finetune_steps and self.clients is None:
            raise ValueError("finetune_steps requires clients, the number of clients that are evaluated one by one")
        return self

    def due(self, round: int, rounds: int) -> bool:
        """Whether the model is evaluated after this one of `rounds` rounds."""
        return round % self.every == 0 or round > rounds - self.last

    def count(self, rounds: int) -> int:
        """The number of rounds, out of `rounds`, after which the model is evaluated."""
        last = min(self.last, rounds)
        return (rounds - last) // self.every + last

    @model_validator(mode="after")
    def _not_selected_on_test(self) -> "EvaluationSpec":
        if self.select and self.on != "validation":
            raise ValueError(
                f"select = true requires on = 'validation' (got {self.on!r}): a model that is selected on the test "
                "examples has a biased result on them"
            )
        return self


def last_rounds(most: int, rounds: int) -> int:
    """The number of final rounds over which a result is averaged: `most`, but at most a third of the rounds."""
    return min(most, max(1, rounds // 3))


class StopSpec(_Table):
    target: float | None = None
    patience: Count | None = None
    min_delta: Annotated[float, Field(ge=0)] | None = None
    seconds: Positive | None = None
    gigabytes: Positive | None = None

    @model_validator(mode="after")
    def _delta_of_patience(self) -> "StopSpec":
        if self.min_delta is not None and self.patience is None:
            raise ValueError(f"min_delta requires patience (got min_delta = {self.min_delta:g} alone)")
        return self


class EngineSpec(_Table):
    name: str = "auto"
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    layout: Layout | None = None
    compile: bool = False
    address: Annotated[str, Field(min_length=1)] | None = None
    gpus: Annotated[float, Field(gt=0)] | None = None

    @property
    def on_ray(self) -> bool:
        return self.address is not None or (self._kind is not None and self._kind.cluster_only)

    @property
    def _kind(self) -> engines.EngineKind | None:
        """The engine by its name; None if it is chosen when the run starts, or was passed in Python."""
        return None if self.name in (engines.AUTO, CUSTOM) else engines.engine_kind(self.name)

    @property
    def where(self) -> str:
        """The device that clients train on. On Ray it is the requested one, which this process may lack."""
        return ("cuda" if self.gpus else "cpu") if self.on_ray else self.device

    @model_validator(mode="after")
    def _consistent(self) -> "EngineSpec":
        if self._kind is not None and self._kind.remote:
            raise ValueError(f"name = {self.name!r} cannot be set in a spec; start a federation with flwr run")
        if self.address is not None and self._kind is not None and not self._kind.on_cluster:
            raise ValueError(f"address requires name = 'ray', 'cohort' or 'auto' (got {self.name!r})")
        if self.gpus is not None and not self.on_ray:
            raise ValueError("gpus requires name = 'ray' or an address; elsewhere all clients share engine.device")
        if self.on_ray and self.device not in ("auto", self.where):
            raise ValueError(f"device on Ray must be 'cuda' with gpus, 'cpu' without (got {self.device!r})")
        return self


def engine_identity(engine: Mapping[str, Any], bit_identical: bool | None = None) -> dict[str, Any]:
    """The fields of an engine that can change a result: not who computes or where, if the arithmetic is the same.

    Args:
        bit_identical: Whether the engine is bit-identical to `serial`; by default, what is known of it by its name.
    """
    if bit_identical is None:
        bit_identical = engine["name"] != CUSTOM and engines.bit_identical(engine["name"])
    kept = {key: value for key, value in engine.items() if key not in ("workers", "address", "gpus")}
    kept["name"] = "serial" if bit_identical else engine["name"]
    return {**kept, "device": "cuda"} if engine.get("gpus") else kept


class MemorySpec(_Table):
    ram_gb: Positive = 4.0
    precision: Precision = "float32"
    keep: Count | None = None


class TrackingSpec(_Table):
    to: list[Literal["tensorboard", "wandb", "mlflow"]] = []
    project: Annotated[str, Field(min_length=1)] = "keel"
    wandb_mode: Literal["online", "offline"] | None = None


def _algorithm(value: Any, info: ValidationInfo) -> Any:
    """The algorithm; where nothing is imported, its table."""
    if isinstance(value, Algorithm):
        return value
    if not isinstance(value.get("name"), str):
        raise ValueError("name must be set, as text")
    registry.check_name("algorithm.name", value["name"], algorithms.REGISTRY, algorithms.ENTRY_POINTS)
    return value if info.context == _WITHOUT_IMPORTS else make_algorithm(**value)


def algorithm_table(algorithm: Algorithm) -> dict[str, Any]:
    """The algorithm as a table of a spec: its name, or "custom" if it cannot be imported, and its settings."""
    cls = type(algorithm)
    importable = cls.__module__ != "__main__" and cls.__qualname__ == cls.__name__
    reference = f"{cls.__module__}:{cls.__name__}" if importable else CUSTOM
    name = cls.name if cls.__module__.startswith("keel.") else reference
    return {"name": name, **{k: v for k, v in algorithm.settings().items() if v is not None}}


AlgorithmField = Annotated[Algorithm, PlainValidator(_algorithm), PlainSerializer(algorithm_table)]


class Spec(_Table):
    """One experiment. Equal specs give bit-identical results."""

    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Count = 400
    algorithm: AlgorithmField
    data: DataSpec
    model: ModelSpec
    local: LocalSpec
    server: ServerSpec
    participation: ParticipationSpec
    evaluation: EvaluationSpec
    stop: Annotated[StopSpec | None, BeforeValidator(_none_if_empty)] = None
    engine: EngineSpec
    memory: MemorySpec
    network: Network | None = None
    compression: Annotated[CompressionSpec | None, BeforeValidator(_none_if_empty)] = None
    availability: Annotated[AvailabilitySpec | None, BeforeValidator(_none_if_empty)] = None
    privacy: PrivacySpec | None = None
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="after")
    def _one_optimizer(self) -> "Spec":
        if isinstance(self.algorithm, Algorithm):
            self.algorithm.check_local(self.local.optimizer, self.local.settings)
        return self

    @model_validator(mode="after")
    def _compressible(self) -> "Spec":
        if self.compression is not None and isinstance(self.algorithm, Algorithm) and self.algorithm.pooled:
            raise KeelError(f"compression must be left out for {self.algorithm.name}, which sends nothing")
        return self

    @model_validator(mode="after")
    def _simulated_availability(self) -> "Spec":
        if self.availability is None:
            return self
        if self.availability.deadline is not None and self.network is None:
            raise KeelError(
                "availability.deadline requires the table [network], which models the time of a client (got deadline "
                f"= {self.availability.deadline:g} without it)"
            )
        if isinstance(self.algorithm, Algorithm) and self.algorithm.pooled:
            raise KeelError(f"availability must be left out for {self.algorithm.name}, which has no clients")
        return self

    @model_validator(mode="after")
    def _private(self) -> "Spec":
        if isinstance(self.algorithm, Algorithm) and self.server.mean is not None:
            check_mean(self.server.mean, self.algorithm)
        if self.server.mean is not None and self.model.buffers == "average":
            raise KeelError("server.mean does not apply to buffers: model.buffers must be 'group_norm' or 'local'")
        if self.privacy is not None:
            self._check_private(self.privacy)
        return self

    def _check_private(self, privacy: PrivacySpec) -> None:
        """Raise a KeelError if other tables contradict the privacy mechanism."""
        if isinstance(self.algorithm, Algorithm):
            privacy.check_algorithm(self.algorithm)
        privacy.check_sampler(self.participation.sampler)
        field = f"privacy.mechanism = {privacy.mechanism!r}"
        at_server = privacy.mechanism in ("central", "tree")
        if privacy.mechanism == "central":
            self._check_private_states(field)
        if at_server and self.availability is not None:
            raise KeelError(f"{field} has no bound for clients that are not always available; remove [availability]")
        if privacy.mechanism != "example" and self.server.weighting != "uniform":
            raise KeelError(f"{field} requires server.weighting = 'uniform' (got {self.server.weighting!r})")
        if at_server and self.server.clip is not None:
            raise KeelError(f"{field} clips reports itself (got server.clip = {self.server.clip!r}); remove it")
        if at_server and self.server.mean is not None:
            raise KeelError(f"{field} takes the mean itself (got server.mean = {self.server.mean!r}); remove it")
        if self.model.buffers == "average" or (privacy.mechanism == "example" and self.model.buffers == "local"):
            raise KeelError(f"{field} does not protect the model's buffers; set model.buffers = 'group_norm'")
        if privacy.mechanism == "example" and self.engine.name == "cohort":
            raise KeelError(f"{field} trains one client at a time; engine.name must be 'auto', 'serial' or 'pool'")
        if privacy.mechanism == "example" and self.local.clip is not None:
            raise KeelError(f"{field} clips gradients itself (got local.clip = {self.local.clip:g}); remove local.clip")

    def _check_private_states(self, field: str) -> None:
        """Raise a KeelError where the result depends on who else took part before.

        The bounds of sampled cohorts require that this stays secret. With Poisson sampling a client's state depends on
        its own participations alone.
        """
        if self.memory.keep is not None and self.participation.sampler != "cyclic":
            raise KeelError(
                f"{field} does not support memory.keep = {self.memory.keep}: whose state is kept depends on "
                "who took part; remove it or set participation.sampler = 'cyclic'"
            )
        stop = None if self.stop is None else self.stop.gigabytes
        if self.participation.sampler == "poisson" and stop is not None:
            raise KeelError(
                f"{field} with participation.sampler = 'poisson' does not support stop.gigabytes = {stop:g}: "
                "the bytes disclose how many clients took part; remove it or set rounds"
            )
        if self.participation.sampler == "uniform" and (kept := self._kept_by_clients()):
            raise KeelError(
                f"{field} has no bound for participation.sampler = 'uniform' where clients keep a state ({kept}); use "
                "'poisson' or 'cyclic'"
            )

    def _kept_by_clients(self) -> str:
        """What makes clients keep a state between their rounds; empty if nothing does."""
        if self.compression is not None and self.compression.feeds_back:
            return "compression.error_feedback"
        if self.local.optimizer_state == "keep":
            return "local.optimizer_state = 'keep'"
        if self.model.buffers == "local":
            return "model.buffers = 'local'"
        if isinstance(self.algorithm, Algorithm) and keeps_state(self.algorithm):
            return f"algorithm.name = {self.algorithm.name!r}"
        return ""

    @property
    def experiment(self) -> dict[str, Any]:
        """The spec without what may differ between two starts of one run, since it does not change the result."""
        table = self.model_dump(exclude_none=True, exclude={"engine": {"workers"}})
        return {section: value for section, value in table.items() if section not in not_computed(table)}

    @property
    def identity(self) -> dict[str, Any]:
        """What is equal for two runs that are bit-identical: the experiment, whichever engine distributes it."""
        table = self.experiment
        return {**table, "engine": engine_identity(table["engine"])}

    def to_toml(self) -> str:
        """The spec as the text of a TOML file."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @property
    def label(self) -> str:
        """A short name: the data set, the model, the algorithm and the seed."""
        names = self.data.name, self.model.name, algorithm_table(self.algorithm)["name"]
        return "-".join([*(name.split(":")[-1].lower() for name in names), f"seed{self.seed}"])


def with_current_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table in which fields have their current names. Former names stay valid."""
    algorithm = table.get("algorithm")
    if not isinstance(algorithm, Mapping) or algorithm.get("name") != "centralized" or "momentum" not in algorithm:
        return dict(table)
    local = table.get("local", {})
    if not isinstance(local, Mapping):
        return dict(table)
    if "momentum" in local:
        both = f"algorithm.momentum = {shown(algorithm['momentum'])} and local.momentum = {shown(local['momentum'])}"
        raise KeelError(f"{both} are one field; remove algorithm.momentum")
    moved = {"momentum": algorithm["momentum"], "optimizer_state": "keep", **local}
    kept = {name: value for name, value in algorithm.items() if name != "momentum"}
    return {**table, "algorithm": kept, "local": moved}


def resolved_spec(table: Mapping[str, Any]) -> Spec:
    """The spec of a resolved table: no defaults are added."""
    return _validated(with_current_names(table))


def check_without_imports(table: Mapping[str, Any]) -> None:
    """Raise the KeelError of `resolved_spec` if it can be known before PyTorch is imported.

    All but the settings of the algorithm, of the data set and of the model is checked.
    """
    _validated(table, _WITHOUT_IMPORTS)


def _validated(table: Mapping[str, Any], context: Mapping[str, bool] | None = None) -> Spec:
    try:
        return Spec.model_validate(table, context=context)
    except ValidationError as error:
        raise KeelError(explain(error)) from None
