"""Recipes of the paper's tables and figures, read from recipes.toml. Nothing here runs or reads a run."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from keel.algorithms import REGISTRY
from keel.config.defaults import make_spec
from keel.config.overrides import merge, override, put
from keel.config.schema import Spec
from keel.errors import KeelError, unknown_name
from keel.paper.lattice import Lattice, make_axis
from keel.runs.search_space import Point

Scale = Literal["paper", "desktop", "smoke"]
SCALES: tuple[Scale, ...] = ("paper", "desktop", "smoke")
SEARCH_SEEDS = [100, 101]
"""Seeds of every point of a search. Reported runs have other seeds, which count from 0."""
FINALISTS, FINAL_SEEDS = 3, [102, 103, 104]
"""The best points are run with more seeds: with two, a learning rate at which some seeds collapse can win."""
SHARED_TABLES = ("campaign", "seconds", "tuned", "guessed", "methods", "settings")
"""Tables of recipes.toml that are not recipes."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Part(_Table):
    """A column of a table or a panel of a figure: methods compared in one setting.

    A method is an algorithm's name, optionally followed by overrides: "ghbm algorithm.tau=5". If the part has
    `trials`, the hyper-parameters of each method are searched first, on held-out examples (lattice.toml).
    """

    title: str
    printed: str | None = None
    """The key of the paper's numbers in printed.toml."""
    spec: dict[str, Any] = {}
    methods: list[str] = []
    seeds: Annotated[int, Field(ge=1)] = 1
    over: dict[str, list[Any]] = {}
    """Fields with the values for which every method is run."""
    trials: Annotated[int, Field(ge=1)] | None = None
    """The number of points that the search for a method's hyper-parameters tries."""
    start: dict[str, Any] = {}
    """Where the search starts, by field, if not where lattice.toml says. A method ignores the fields that it lacks."""
    searched: list[str] = []
    """The fields that are searched, if not all that lattice.toml has for the method."""
    search_rounds: Annotated[int, Field(ge=1)] | None = None
    """The rounds of the search, if they differ from those of the runs."""
    search_last: Annotated[int, Field(ge=1)] | None = None
    """The rounds over which a trial's accuracy is averaged, if they differ from `evaluation.last` of the runs. Each of
    these rounds is evaluated, which takes most of the time of a trial where a round is short."""
    tuned: str = ""
    """How the hyper-parameters were chosen, if neither by a search nor as the defaults of the data set."""

    def lattice(self, method: str) -> Lattice | None:
        """Return the points that the search for a method's hyper-parameters may try, or None if there is no search."""
        if self.trials is None:
            return None
        name, overrides = _parse_method(method)
        described = _read("lattice.toml")
        axes = {**described["all"], **described[name]}
        settings = {f"algorithm.{field.name}" for field in fields(REGISTRY[name])}
        axes |= {field: start for field, start in self.start.items() if field in {*axes, *settings}}
        fixed = {field.partition("=")[0] for field in overrides}
        searched = [field for field in self.searched or axes if field not in fixed]
        return Lattice({field: make_axis(axes[field]) for field in searched})

    def trial_specs(self, method: str, point: Point, seeds: Sequence[int] = SEARCH_SEEDS) -> list[Spec]:
        """Return the runs of one point of the search: one per seed, evaluated on held-out examples."""
        rounds = {} if self.search_rounds is None else {"rounds": self.search_rounds}
        last = {} if self.search_last is None else {"last": self.search_last, "every": 50}
        table = merge(self.spec, rounds, {"evaluation": {"on": "validation", **last}})
        for field, values in self.over.items():
            put(table, field, values[0])
        return self._seeded(method, table, point, seeds)

    def specs(self, method: str, seeds: int | None = None, point: Point | None = None) -> list[Spec]:
        """Return the specs of a method's runs: every combination of the values in `over`, for every seed.

        `point` has the hyper-parameters that a search chose.
        """
        result = []
        for values in product(*self.over.values()):
            table = merge(self.spec)
            for field, value in zip(self.over, values, strict=True):
                put(table, field, value)
            result += self._seeded(method, table, point, range(seeds or self.seeds))
        return result

    def _seeded(self, method: str, table: dict[str, Any], point: Point | None, seeds: Sequence[int]) -> list[Spec]:
        """Return a spec for each seed. No default depends on the seed, so that one spec is resolved for all of them."""
        first = self._spec(method, merge(table, {"seed": seeds[0]}), point)
        return [first, *(first.model_copy(update={"seed": seed}) for seed in seeds[1:])]

    def _spec(self, method: str, table: dict[str, Any], point: Point | None) -> Spec:
        name, overrides = _parse_method(method)
        table = override(merge(table, {"algorithm": {"name": name}}), overrides)
        for field, value in (point or {}).items():
            put(table, field, value)
        return make_spec(table)

    def how_tuned(self) -> str:
        """Return one or two sentences on how the hyper-parameters were chosen: search, criterion, seeds and setting."""
        if self.tuned or self.trials is None:
            return self.tuned or _read("recipes.toml")["tuned"][self.spec.get("data", {}).get("name", "digits")]
        rounds = "" if self.search_rounds is None else f" of {self.search_rounds}-round runs"
        text = f"Each method at the best of {self.trials} points of its search, by the final accuracy{rounds} on "
        text += (
            f"held-out examples: the {FINALISTS} points with the best mean of {len(SEARCH_SEEDS)} seeds are run with "
        )
        text += f"{len(FINAL_SEEDS)} more, and the one whose worst seed is best is chosen. None of the seeds "
        text += f"({SEARCH_SEEDS[0]} to {FINAL_SEEDS[-1]}) is reported."
        return f"{text} The search used the first value and was not repeated for the others." if self.over else text

    def guesses(self, spec: Spec) -> bool:
        """Return whether Keel guesses hyper-parameters of this run because the paper does not give them."""
        return self.trials is None and spec.algorithm.name in _read("recipes.toml")["guessed"].get(spec.data.name, [])


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
    tables = _read("recipes.toml")
    expanded = {
        name: _expand(table, tables["methods"], tables["settings"])
        for name, table in tables.items()
        if name not in SHARED_TABLES
    }
    return {name: Recipe(name=name, **table) for name, table in expanded.items()}


def campaign_order() -> list[str]:
    """Return the names of the recipes with runs, those first whose results are worth most."""
    return _read("recipes.toml")["campaign"]["order"]


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
    seconds = _read("recipes.toml")["seconds"].get(f"{spec.data.name}-{spec.model.name}")
    if seconds is None:
        return None
    if spec.algorithm.name == "centralized":  # a round is an epoch over all data, on one of the two cores
        seconds *= 2 / spec.participation.rate
    return spec.rounds * seconds


@cache
def printed_title(printed: str) -> str:
    """Return the title of the paper's setting whose numbers have this key in printed.toml."""
    settings = _read("recipes.toml")["settings"].values()
    return next((setting["title"] for setting in settings if setting.get("printed") == printed), printed)


@cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


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
