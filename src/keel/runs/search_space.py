"""The search space of a sweep: fields of a spec with the values to try, and the points they give."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from importlib.resources import files
from itertools import islice, product
from math import exp, floor, log, prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from keel.config.defaults import completed, make_spec
from keel.config.fields import put_field
from keel.config.overrides import NOT_TOML, merge
from keel.config.schema import Spec
from keel.config.values import check_values
from keel.core.randomness import keyed_rng
from keel.errors import KeelError, explain, shown, unknown_name

FIXED = {"seed": "search.seeds (--seeds)", "evaluation.on": "search.on (--on)"}
"""Fields that a sweep sets, and the option that controls each."""
MOST_RUNS = 100_000
"""The largest number of runs of a sweep or a comparison."""

Point = dict[str, Any]
"""A value for each searched field."""


class Range(BaseModel):
    """The numbers from `low` to `high`; integers if both ends are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low must be below high (got {self.low} and {self.high})")
        if self.log and self.low <= 0:
            raise ValueError(f"low must be positive with log = true (got {self.low})")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> list[Any]:
        return [self.low, self.high]

    def draw(self, rng: np.random.Generator) -> int | float:
        low, high = self.low, self.high + 1 if self.whole else self.high
        value = exp(rng.uniform(log(low), log(high))) if self.log else rng.uniform(low, high)
        value = min(max(value, self.low), self.high)  # rounding may exceed an end
        return floor(value) if self.whole else value


Axis = list[Any] | Range
"""The values to try for a field: a list, or a range."""


class Search(BaseModel):
    """The [search] table of a sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    method: Literal["grid", "random", "optuna"] = "grid"
    grid: str | None = None
    fields: dict[str, Any] = {}
    points: Annotated[int, Field(ge=1, le=MOST_RUNS)] | None = None
    seeds: (
        Annotated[int, Field(ge=1, le=MOST_RUNS)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    ) = 1
    on: Literal["validation", "test"] = "validation"
    sampler: Literal["tpe", "random", "cmaes", "gp"] | None = None
    pruner: Literal["median", "halving", "hyperband"] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "Search":
        if self.method == "grid" and self.points is not None:
            raise ValueError(f"points = {self.points} requires method = 'random' or 'optuna' (got 'grid')")
        if self.method != "grid" and self.points is None:
            raise ValueError(f"points must be set (--points) for method = {self.method!r}")
        for name in ("sampler", "pruner"):
            if self.method != "optuna" and getattr(self, name) is not None:
                raise ValueError(f"{name} requires method = 'optuna' (got {self.method!r})")
        if isinstance(self.seeds, list) and len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be distinct (got {self.seeds})")
        return self


@dataclass(frozen=True)
class Plan:
    """A search over fields of one spec. Every value that it can try is a valid value of the spec."""

    search: Search
    table: dict[str, Any]
    axes: dict[str, Axis]

    @cached_property
    def base(self) -> Spec:
        """The spec without the searched fields."""
        return make_spec(self.table)

    @property
    def seeds(self) -> list[int]:
        given = self.search.seeds
        return given if isinstance(given, list) else [self.base.seed + i for i in range(given)]

    def specs(self, point: Point) -> list[Spec]:
        """The runs of a point: one per seed, evaluated on the examples that the selection uses."""
        return [self._spec({**point, "seed": seed, "evaluation.on": self.search.on}) for seed in self.seeds]

    def runs(self, point: Point, path: Path) -> list[tuple[Spec, Path]]:
        """The runs of a point with their folders, which are named after it, so that a larger search reuses them."""
        return [(spec, path / name_of(point) / f"seed{spec.seed}") for spec in self.specs(point)]

    def chosen(self, point: Point) -> Spec:
        """The spec of a point as a separate experiment: evaluated on the test examples, with the first seed."""
        return self._spec({**point, "evaluation.on": "test", "evaluation.select": None})

    def points(self) -> list[Point]:
        """The points of a grid or of a random search."""
        found = _product(self.axes) if self.search.method == "grid" else _drawn(self.axes, self.base.seed)
        return list(islice(found, self.search.points))

    def described(self) -> dict[str, Any]:
        """The search as JSON: its settings with the fields of a named grid and the seeds."""
        axes = {key: axis.model_dump() if isinstance(axis, Range) else axis for key, axis in self.axes.items()}
        return {**self.search.model_dump(exclude_none=True), "fields": axes, "seeds": self.seeds}

    def _spec(self, values: Mapping[str, Any]) -> Spec:
        table = merge(self.table)
        for key, value in values.items():
            put_field(table, key, value)
        return make_spec(table)


def make_plan(table: Mapping[str, Any], fixed: Iterable[str] = ()) -> Plan:
    """The search that the [search] table of `table` describes, over the spec that the other tables describe.

    Args:
        fixed: Fields that are not searched even if a named grid has them.
    """
    check_values(table)
    rest = {section: value for section, value in table.items() if section != "search"}
    completed(rest)
    try:
        search = Search.model_validate(table.get("search", {}))
    except ValidationError as error:
        raise KeelError(explain(error, "search")) from None
    base = make_spec(rest)
    named = {} if search.grid is None else _grid(search.grid, base)
    axes = {key: axis for key, axis in named.items() if key not in fixed}
    for key, value in _fields(search.fields):
        if key in fixed:
            raise KeelError(f"{key} is both searched and set; remove it from the options (--set) or from the search")
        axes[key] = _axis(key, value)
    plan = Plan(search, rest, axes)
    _check(plan)
    return plan


def parse_over(assignments: Iterable[str]) -> dict[str, Any]:
    """Fields from "key=value,value,..." or "key=low..high[,log]", as the [search.fields] table has them."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not (equals and key and text):
            raise KeelError(f"--over must be key=value,value or key=low..high[,log] (got {shown(assignment)})")
        low, dots, high = text.removesuffix(",log").partition("..")
        if dots:
            ends = _values(f"{low},{high}")
            if len(ends) != 2:
                raise KeelError(
                    f"--over with a range must be key=low..high or key=low..high,log (got {shown(assignment)})"
                )
            fields[key] = {"low": ends[0], "high": ends[1], "log": text.endswith(",log")}
        else:
            fields[key] = _values(text)
    return fields


def parse_seeds(text: str) -> int | list[int]:
    """A number of seeds, or a list of seeds separated by commas."""
    values = _values(text)
    if not all(isinstance(value, int) for value in values):
        raise KeelError(f"--seeds must be a number, as in 3, or seeds, as in 100,101 (got {shown(text)})")
    return values[0] if len(values) == 1 and "," not in text else values


def name_of(point: Point) -> str:
    """The folder name of a point: its fields and values, shown where a file name could not hold them."""
    text = ",".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in point.items())
    return file_name(text)


def file_name(text: str) -> str:
    """The text as a file name; a hash distinguishes it where it is shown or characters are replaced."""
    plain = re.sub(r"[^\w.=,+-]", "_", text, flags=re.ASCII)
    return text if plain == text and len(text) <= 150 else f"{plain[:100]}-{sha256(text.encode()).hexdigest()[:8]}"


@cache
def grids() -> dict[str, Any]:
    """The grids of grids.toml."""
    return tomllib.loads(files(__package__).joinpath("grids.toml").read_text(encoding="utf-8"))


def _grid(name: str, base: Spec) -> dict[str, Axis]:
    """The axes of a named grid for the algorithm of `base`; "paper" is the grid for its data set and model."""
    known = grids()
    if name == "paper":
        suiting = [n for n, g in known.items() if base.data.name in g["data"] and base.model.name == g["model"]]
        if not suiting:
            setting = f"{base.data.name} with {base.model.name}"
            raise KeelError(f"search.grid = 'paper' has no grid for {setting}; known: {', '.join(known)}")
        name = suiting[0]
    if name not in known:
        raise unknown_name("search.grid", name, ["paper", *known])
    listed, algorithm = known[name]["with"], base.algorithm.name
    methods = known[listed]["with"] if isinstance(listed, str) else listed
    if algorithm not in methods:
        raise KeelError(f"search.grid = {name!r} does not cover {algorithm!r}; it covers {', '.join(methods)}")
    return {**known[name]["all"], **methods[algorithm]}


def _fields(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The fields under their full names; TOML parses unquoted dotted names as nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not value.keys() & {"low", "high"}:
            yield from _fields(value, f"{above}{key}.")
        else:
            yield above + key, value


def _axis(key: str, value: Any) -> Axis:
    if key in FIXED:
        raise KeelError(f"search.fields must not contain {key!r}; use {FIXED[key]}")
    if isinstance(value, Mapping):
        try:
            return Range.model_validate(value)
        except ValidationError as error:
            raise KeelError(f"search.fields: {key}: {explain(error).removeprefix(': ')}") from None
    if not isinstance(value, list) or not value:
        valid = "a list of values or { low = 0.01, high = 1.0, log = true }"
        raise KeelError(f"search.fields: {key} must be {valid} (got {shown(value)})")
    if len({json.dumps(v) for v in value}) < len(value):
        raise KeelError(f"search.fields: the values of {key} must be distinct (got {shown(value)})")
    return value


def _check(plan: Plan) -> None:
    search, axes = plan.search, plan.axes
    if not axes:
        raise KeelError("search.fields is empty; use --over local.lr=0.01,0.1 or --grid paper")
    size = _size(axes)
    check_number_of_runs((search.points or size or 1) * len(plan.seeds))
    for key, axis in axes.items():
        if search.method == "grid" and isinstance(axis, Range):
            raise KeelError(f"search.fields: {key} is a range; use a list of values, or --method random or optuna")
        for value in axis.ends if isinstance(axis, Range) else axis:
            plan.specs({key: value})  # an invalid value is refused here, not in the middle of the sweep
    if search.method == "random" and size is not None and search.points is not None and search.points > size:
        raise KeelError(f"search.points must be at most {size}, the number of combinations (got {search.points})")


def check_number_of_runs(number: int) -> None:
    """Raise a KeelError if no machine could do so many runs."""
    if number > MOST_RUNS:
        raise KeelError(f"this asks for {number:,} runs, but {MOST_RUNS:,} are the most; use fewer values or seeds")


def _size(axes: Mapping[str, Axis]) -> int | None:
    """The number of points; None if a range has no end of them."""
    if any(isinstance(axis, Range) and not axis.whole for axis in axes.values()):
        return None
    return prod(len(axis) if isinstance(axis, list) else int(axis.high - axis.low) + 1 for axis in axes.values())


def _product(axes: Mapping[str, Axis]) -> Iterator[Point]:
    choices = [axis if isinstance(axis, list) else [] for axis in axes.values()]
    return (dict(zip(axes, values, strict=True)) for values in product(*choices))


def _drawn(axes: Mapping[str, Axis], seed: int) -> Iterator[Point]:
    """Random points without repetition; a longer sequence starts with the same ones."""
    rng, seen = keyed_rng(seed, "sweep"), set()
    while True:
        point = {
            key: axis.draw(rng) if isinstance(axis, Range) else axis[rng.integers(len(axis))]
            for key, axis in axes.items()
        }
        if (name := json.dumps(point)) not in seen:
            seen.add(name)
            yield point


def _values(text: str) -> list[Any]:
    """Values separated by commas; what is not TOML is taken as text."""
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except NOT_TOML:
        return text.split(",")
