"""Configuration of a Flower app: the spec of the experiment, and the table `federation`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from keel.config.defaults import make_spec
from keel.config.overrides import put
from keel.config.schema import CUSTOM, Spec
from keel.deploy.flower_adapter import log
from keel.errors import KeelError, explain, unknown_name
from keel.privacy.settings import PrivacySpec


class Federation(BaseModel):
    """The table `federation` of an app's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    sites: Annotated[int, Field(ge=1)]
    """Number of sites. All of them must be connected when a run starts."""
    out: Annotated[str, Field(min_length=1)]
    """Run folder on the server. If it exists, the run is resumed."""
    min_replies: Annotated[int, Field(ge=1)] = 1
    """Valid replies that a round needs. A round with fewer is repeated."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Time that a site has to reply."""
    wait_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """How long a new run waits for all sites, and a round for `min_replies`."""
    max_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest Euclidean norm of a reported tensor. A reply with a larger one is dropped; 0 for no bound."""
    study: str = ""
    """ID of the study, which must be equal to `study` in the policy of each site."""
    allow_new_keys: bool = False
    """Whether a site may reconnect with another node key than at the start of the run."""
    max_examples: Annotated[int, Field(ge=1)] = 10_000_000
    """Largest number of training examples, and of test examples, that a site may state."""
    allow_new_data: bool = False
    """Whether a site may come back with other data of the same size than when it joined."""
    idle_rounds: Annotated[int, Field(ge=1)] = 3
    """Rounds in a row without a valid reply of a site after which the site is reported."""
    on_outlier: Literal["report", "stop"] = "report"
    """Whether the training continues or stops when a site is reported as an outlier."""
    left: str = ""
    """Numbers of the sites that have left, separated by commas. Flower's configuration has no lists."""
    metrics_file: str = "metrics.prom"
    """File with the metrics of the last round for Prometheus, relative to the run folder; empty for none."""

    @field_validator("left")
    @classmethod
    def _check_left(cls, value: str) -> str:
        if not all(part.strip().isdecimal() for part in value.split(",") if value):
            raise ValueError(f"must be numbers of sites separated by commas, as '1,2' (got {value!r})")
        return value

    @property
    def left_sites(self) -> frozenset[int]:
        return frozenset(int(part) for part in self.left.split(",") if part)

    @property
    def members(self) -> list[int]:
        """The sites that take part."""
        return [site for site in range(self.sites) if site not in self.left_sites]


RENAMED = {
    "least": "min_replies",
    "timeout": "timeout_seconds",
    "wait": "wait_seconds",
    "largest_norm": "max_norm",
    "rebind": "allow_new_keys",
}
"""Deprecated names of the fields of `federation`."""
LARGEST_SHARE, LARGEST_WEIGHT = 1.5, 0.5
"""The default of `server.largest_weight` with at least three sites: so many times the equal share, at most one half."""
FLOATS = ("timeout_seconds", "wait_seconds", "max_norm")
"""Fields for which an integer is accepted too."""


def read_settings(config: Mapping[str, Any]) -> tuple[Spec, Federation]:
    """Read the configuration of a Flower run: a flat table with dotted names.

    Returns:
        The spec of the experiment and the settings of the federation.
    """
    table: dict[str, Any] = {}
    for key, value in config.items():
        put(table, key, value)
    federation = _read_federation(table.pop("federation", {}))
    return _read_spec(table, federation.sites), federation


def bounds(sites: int, mean: str | None = None) -> dict[str, Any]:
    """The defaults of `server` that bound the influence of one of so many sites.

    The geometric median is the report of a site that has half of the weight, so that the shares are equal with it.
    """
    largest = 1 / sites if mean == "geometric_median" else min(LARGEST_WEIGHT, LARGEST_SHARE / sites)
    return {"clip": "adaptive", "largest_weight": largest if sites >= 3 else 1.0}


def _read_federation(table: Mapping[str, Any]) -> Federation:
    fields: dict[str, Any] = {}
    for name, value in table.items():
        field = RENAMED.get(name, name)
        if field not in Federation.model_fields:
            raise unknown_name("federation", name, Federation.model_fields)
        if field != name:
            if field in table:
                raise KeelError(f"federation.{name} is the deprecated name of federation.{field}; remove one of them")
            log.warning("federation.%s is deprecated; rename it to federation.%s", name, field)
        fields[field] = value
    try:
        return Federation.model_validate({k: float(v) if k in FLOATS else v for k, v in fields.items()})
    except (ValidationError, TypeError) as error:
        text = explain(error) if isinstance(error, ValidationError) else str(error)
        raise KeelError(f"federation.{text}") from None


def _check_privacy(privacy: PrivacySpec, sampler: str) -> None:
    if privacy.mechanism == "central" and sampler != "cyclic":
        raise KeelError(
            "participation.sampler must be 'cyclic' in a federation with privacy.mechanism = 'central' (got "
            f"{sampler!r}): sampled cohorts would follow from the seed, which sites know"
        )
    if privacy.noise is None:
        raise KeelError("privacy.noise must be set in a federation: sites do not derive it from privacy.epsilon")
    if privacy.mechanism == "tree" or privacy.quantile is not None:
        field = "mechanism = 'tree'" if privacy.mechanism == "tree" else f"quantile = {privacy.quantile:g}"
        raise KeelError(
            f"privacy.{field} is not supported in a federation: its noise would follow from the seed, which sites know"
        )


def _read_spec(table: dict[str, Any], sites: int) -> Spec:
    for section in "data", "model", "participation", "server", "engine":
        if not isinstance(table.get(section, {}), Mapping):
            raise KeelError(f"{section} must be a table, as in {section}.name (got {table[section]!r})")
    for section in "data", "model":
        if "name" in table.get(section, {}):
            raise KeelError(f"{section}.name must not be set (got {table[section]['name']!r}): the app defines it")
    if "init" in table.get("model", {}):
        raise KeelError(
            f"model.init must not be set (got {table['model']['init']!r}): load the weights in the app's model()"
        )
    table["data"] = {"name": CUSTOM}
    table["model"] = {**table.get("model", {}), "name": CUSTOM}
    server = table.get("server", {})
    bounded = bounds(sites, server.get("mean"))
    participation: dict[str, Any] = {"rate": 1.0}
    privacy = table.get("privacy")
    if isinstance(privacy, Mapping) and privacy.get("mechanism", "central") in ("central", "tree"):
        del bounded["clip"]  # the private mean clips
        participation["sampler"] = "cyclic"  # sites know the seed, so that no sampling is secret
    table["participation"] = {**participation, **table.get("participation", {})}
    table["server"] = {**bounded, **server}
    for field in table.get("engine", {}):
        if field != "device":
            raise KeelError(
                f"engine.{field} must not be set (got {table['engine'][field]!r}): the sites train the clients"
            )
    if "availability" in table:
        raise KeelError("availability must be left out in a federation: it simulates clients, and sites are real")
    spec = make_spec(table)
    if spec.algorithm.pooled:
        raise KeelError(f"algorithm.name must be a federated algorithm (got {spec.algorithm.name!r})")
    if spec.privacy is not None:
        _check_privacy(spec.privacy, spec.participation.sampler)
    if spec.evaluation.on == "validation":
        raise KeelError("evaluation.on must be 'test' in a federation (got 'validation')")
    if unsupported := sorted(set(spec.evaluation.metrics or ()) - {"accuracy", "test_loss"}):
        raise KeelError(
            f"evaluation.metrics must be 'accuracy' or 'test_loss' in a federation (got {unsupported[0]!r}): sites "
            "report only sums"
        )
    if spec.evaluation.clients is not None:
        raise KeelError(f"evaluation.clients must be left out in a federation (got {spec.evaluation.clients})")
    if spec.evaluation.deviation:
        raise KeelError(
            f"evaluation.deviation must be empty in a federation (got {list(spec.evaluation.deviation)}): "
            "it trains every client in every round"
        )
    return spec
