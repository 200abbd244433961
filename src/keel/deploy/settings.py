"""How a federation is run besides its experiment, and the two told apart in a Flower app's configuration."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from keel.algorithms import REGISTRY
from keel.errors import KeelError, explain, unknown
from keel.runs.spec import CUSTOM, Spec, make_spec, put


class Federation(BaseModel):
    """The table `federation` of the app's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    sites: Annotated[int, Field(ge=1)]
    """How many there are. All of them have to be there when a training begins."""
    out: Annotated[str, Field(min_length=1)]
    """The run's folder on the server. Where it exists the run is gone on with."""
    least: Annotated[int, Field(ge=1)] = 1
    """Answers that a round needs; with fewer it is asked for again."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that sites have for an answer."""
    wait: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that a beginning training waits for all sites, and a round for the least number."""
    largest_norm: Annotated[float, Field(gt=0)] | None = None
    """Of a tensor that a site reports; an answer with a larger one is set aside."""
    rebind: bool = False
    """Whether a site may come back as another node than it was when the training began: with a new key."""


def read_settings(config: Mapping[str, Any]) -> tuple[Spec, Federation]:
    """The spec and the federation that a Flower run's configuration (flat, with dotted names) describes."""
    table: dict[str, Any] = {}
    for key, value in config.items():
        put(table, key, value)
    given = table.pop("federation", {})
    for field in given:
        if field not in Federation.model_fields:
            raise unknown("federation", field, Federation.model_fields)
    try:
        federation = Federation.model_validate({k: float(v) if k in FLOATS else v for k, v in given.items()})
    except (ValidationError, TypeError) as error:
        text = explain(error) if isinstance(error, ValidationError) else str(error)
        raise KeelError(f"federation.{text}") from None
    for section in "data", "model":
        if "name" in table.get(section, {}):
            raise KeelError(f"{section}.name: {table[section]['name']!r}; accepted: none, it is the app's own")
    table["data"] = {"name": CUSTOM}
    table["model"] = {**table.get("model", {}), "name": CUSTOM}
    table["participation"] = {"rate": 1.0, **table.get("participation", {})}
    for field in table.get("engine", {}):
        if field != "device":
            raise KeelError(f"engine.{field}: {table['engine'][field]!r}; accepted: none, for the sites train")
    algorithm = table.get("algorithm", {})
    if hasattr(REGISTRY.get(algorithm.get("name")), "tau_i"):  # a site may be away for long, whatever the rate
        table["algorithm"] = {"tau_i": "actual", **algorithm}
    spec = make_spec(table)
    if spec.algorithm.pooled:
        raise KeelError(f"algorithm.name: {spec.algorithm.name!r} has all examples at one place; accepted: another")
    if spec.evaluation.on == "validation":
        raise KeelError("evaluation.on: 'validation'; accepted: 'test', on the server's or the sites' test examples")
    if spec.evaluation.deviation:
        raise KeelError("evaluation.deviation: has every client train in every round; accepted: none, over sites")
    return spec, federation


FLOATS = ("timeout", "wait", "largest_norm")
