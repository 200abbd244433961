"""Recipes of the paper's tables and figures, read from recipes.toml. Nothing here runs or reads a run."""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from keel.config.overrides import merge, override, put
from keel.config.schema import Spec
from keel.errors import KeelError, unknown_name
from keel.runs.compare import jobs_of
from keel.runs.search_space import Plan, Point, make_plan

Scale = Literal["paper", "desktop", "smoke"]
SCALES: tuple[Scale, ...] = ("paper", "desktop", "smoke")
SEARCH_SEEDS = [100, 101]
"""Seeds of the searches. Reported runs have other seeds, which count from 0."""
SHARED_TABLES = ("seconds", "tuned", "guessed", "methods", "settings")
"""Tables of recipes.toml that are not recipes."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Part(_Table):
    """A column of a table or a panel of a figure: methods compared in one setting.

    A method is an algorithm's name, optionally followed by overrides: "ghbm algorithm.tau=5". If the part has a
    `grid` (a name in grids.toml), the hyper-parameters of each method are searched first, on held-out examples.
    """

    title: str
    printed: str | None = None
    """The key of the paper's numbers in printed.toml."""
    spec: dict[str, Any] = {}
    methods: list[str] = []
    seeds: Annotated[int, Field(ge=1)] = 1
    over: dict[str, list[Any]] = {}
    """Fields with the values for which every method is run."""
    grid: str | None = None
    search: dict[str, Any] = {}
    """The setting of the search, if it differs from that of the runs."""
    search_rounds: Annotated[int, Field(ge=1)] | None = None
    """The rounds of the search, if they differ from those of the runs."""
    tuned: str = ""
    """How the hyper-parameters were chosen, if neither by a search nor as the defaults of the data set."""

    def plan(self, method: str) -> Plan | None:
        """Return the search for a method's hyper-parameters, or None if the part has no grid."""
        if self.grid is None:
            return None
        name, overrides = _parse_method(method)
        rounds = {} if self.search_rounds is None else {"rounds": self.search_rounds}
        table = override(merge(self.search or self.spec, rounds, {"algorithm": {"name": name}}), overrides)
        search = {"grid": self.grid, "seeds": SEARCH_SEEDS}
        return make_plan({**table, "search": search}, fixed=[field.partition("=")[0] for field in overrides])

    def specs(self, method: str, seeds: int | None = None, point: Point | None = None) -> list[Spec]:
        """Return the specs of a method's runs: every combination of the values in `over`, for every seed.

        `point` has the hyper-parameters that a search chose.
        """
        name, overrides = _parse_method(method)
        table = merge(self.spec)
        for field, value in (point or {}).items():
            put(table, field, value)
        table = override(table, overrides)
        over = [f"{field}={','.join(map(json.dumps, values))}" for field, values in self.over.items()]
        return [job.spec for job in jobs_of(table, [name], seeds or self.seeds, over, Path())]

    def how_tuned(self) -> str:
        """Return one or two sentences on how the hyper-parameters were chosen: grid, criterion, seeds and setting."""
        if self.tuned or self.grid is None:
            return self.tuned or _read_recipes()["tuned"][self.spec.get("data", {}).get("name", "digits")]
        seeds = " and ".join(map(str, SEARCH_SEEDS))
        rounds = "" if self.search_rounds is None else f" of {self.search_rounds}-round runs"
        text = f"Each method at the best point of the grid '{self.grid}', by the final accuracy{rounds} on held-out "
        text += f"examples with seeds {seeds}, which are not reported."
        if self.search:
            return f"{text} The search used the non-IID setting and was not repeated here."
        return f"{text} The search used the first value and was not repeated for the others." if self.over else text

    def guesses(self, spec: Spec) -> bool:
        """Return whether Keel guesses hyper-parameters of this run because the paper does not give them."""
        return self.grid is None and spec.algorithm.name in _read_recipes()["guessed"].get(spec.data.name, [])


class Recipe(_Table):
    """A table or a figure, with its parts at each scale."""

    name: str
    kind: Literal["table", "figure"]
    number: str
    """The paper's number, as in "Table 2"; empty for what the paper does not contain."""
    label: str = ""
    """The label in the paper's source."""
    title: str
    shows: str
    view: str
    """How the parts are rendered: a key of SHEETS and PANELS, or of COMPUTED."""
    against: str = ""
    """The field on the x-axis, if the view is "against"."""
    finds: str = ""
    """The paper's conclusion, for a figure without printed numbers."""
    paper: list[Part] = []
    desktop: list[Part] = []
    smoke: list[Part] = []

    def parts(self, scale: Scale) -> list[Part]:
        return {"paper": self.paper, "desktop": self.desktop, "smoke": self.smoke}[scale]


@cache
def all_recipes() -> dict[str, Recipe]:
    """Return the recipes by name, in the order of the paper."""
    tables = _read_recipes()
    expanded = {
        name: _expand(table, tables["methods"], tables["settings"])
        for name, table in tables.items()
        if name not in SHARED_TABLES
    }
    return {name: Recipe(name=name, **table) for name, table in expanded.items()}


def find_recipe(name: str) -> Recipe:
    """Return the recipe with that name, or with that number in the paper."""
    recipes = all_recipes()
    numbers = {recipe.number.lower(): recipe for recipe in recipes.values() if recipe.number}
    if name not in recipes and name.lower() not in numbers:
        raise unknown_name("table or figure", name, recipes)
    return recipes.get(name) or numbers[name.lower()]


def check_scale(recipe: Recipe, scale: Scale) -> None:
    """Raise KeelError if the recipe is not in the paper and the scale is the paper's."""
    if recipe.number == "" and scale == "paper":
        raise KeelError(f"{recipe.name} is not in the paper; use --scale desktop or --scale smoke (got --scale paper)")


def rough_seconds(spec: Spec) -> float | None:
    """Return the approximate wall-clock time of a run on two cores, or None if it has not been measured."""
    seconds = _read_recipes()["seconds"].get(f"{spec.data.name}-{spec.model.name}")
    if seconds is None:
        return None
    if spec.algorithm.name == "centralized":  # a round is an epoch over all data, on one of the two cores
        seconds *= 2 / spec.participation.rate
    return spec.rounds * seconds


@cache
def printed_title(printed: str) -> str:
    """Return the title of the paper's setting whose numbers have this key in printed.toml."""
    titles = (setting["title"] for setting in _read_recipes()["settings"].values() if setting.get("printed") == printed)
    return next(titles, printed)


@cache
def _read_recipes() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("recipes.toml").read_text(encoding="utf-8"))


def _expand(recipe: dict[str, Any], groups: Mapping[str, list[str]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with the groups of methods and the settings that it names written out."""
    result = dict(recipe)
    for scale in SCALES:
        result[scale] = []
        for part in recipe.get(scale, []):
            setting = settings[part["setting"]] if "setting" in part else {}
            overrides = {k: v for k, v in part.items() if k != "setting"}
            table = {**setting, **overrides, "spec": merge(setting.get("spec", {}), part.get("spec", {}))}
            if isinstance(table.get("methods"), str):
                table["methods"] = groups[table["methods"]]
            result[scale].append(table)
    return result


def _parse_method(method: str) -> tuple[str, list[str]]:
    """Return an algorithm's name and the overrides after it."""
    name, *overrides = method.split()
    return name, overrides
