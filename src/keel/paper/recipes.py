"""The recipes: every table and figure by name, and at each scale its parts, as kept in recipes.toml. Runs nothing."""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from keel.errors import KeelError, unknown
from keel.runs.comparing import jobs_of
from keel.runs.search import Plan, Point, make_plan
from keel.runs.spec import Spec, merge, override, put

Scale = Literal["paper", "desktop", "smoke"]
SEARCH_SEEDS = [100, 101]
"""Apart from those that are reported, which begin at 0."""
SHARED = ("seconds", "tuned", "guessed", "methods", "settings")
"""Tables of recipes.toml that are no table or figure of the paper."""
SCALES: tuple[Scale, ...] = ("paper", "desktop", "smoke")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Part(_Table):
    """A column of a table or a panel of a figure: methods that are compared in one setting, over fields or not.

    A method is its name, with fields of its own behind it: "ghbm algorithm.tau=5". With a `grid` (of grids.toml) each
    method's own fields are first searched, on held-out examples, in the setting as it stands.
    """

    title: str
    printed: str | None = None
    """Where the paper's numbers for it are in printed.toml."""
    spec: dict[str, Any] = {}
    methods: list[str] = []
    seeds: Annotated[int, Field(ge=1)] = 1
    over: dict[str, list[Any]] = {}
    grid: str | None = None
    search: dict[str, Any] = {}
    """The setting of the search, where it is another than that of the runs."""
    search_rounds: Annotated[int, Field(ge=1)] | None = None
    """Of the search, where they are fewer."""
    tuned: str = ""
    """How fields were chosen that are neither searched nor the defaults of the data set."""

    def plan(self, method: str) -> Plan | None:
        """The search for a method's fields, if it has one."""
        if self.grid is None:
            return None
        name, own = _read(method)
        fewer = {} if self.search_rounds is None else {"rounds": self.search_rounds}
        table = override(merge(self.search or self.spec, fewer, {"algorithm": {"name": name}}), own)
        search = {"grid": self.grid, "seeds": SEARCH_SEEDS}
        return make_plan({**table, "search": search}, fixed=[field.partition("=")[0] for field in own])

    def specs(self, method: str, seeds: int | None = None, point: Point | None = None) -> list[Spec]:
        """A method's runs: every combination of values from every seed, with the fields that were found for it."""
        name, own = _read(method)
        table = merge(self.spec)
        for field, value in (point or {}).items():
            put(table, field, value)
        table = override(table, own)
        over = [f"{field}={','.join(map(json.dumps, values))}" for field, values in self.over.items()]
        return [job.spec for job in jobs_of(table, [name], seeds or self.seeds, over, Path())]

    def how_tuned(self) -> str:
        """In a sentence or two, how its methods' fields were chosen: grid, criterion, seeds and setting."""
        if self.tuned or self.grid is None:
            return self.tuned or _read_recipes()["tuned"][self.spec.get("data", {}).get("name", "digits")]
        seeds = " and ".join(map(str, SEARCH_SEEDS))
        rounds = "" if self.search_rounds is None else f", in runs of {self.search_rounds} rounds"
        found = f"Each method at its best of the grid {self.grid!r}, by the accuracy over the last rounds on held-out "
        found += f"examples{rounds} from seeds {seeds}, which are not reported."
        if self.search:
            return f"{found} They were searched in the non-IID setting, not anew here."
        return f"{found} They were searched at the first of the values, not anew for each." if self.over else found

    def guesses(self, spec: Spec) -> bool:
        """Whether the paper leaves hyper-parameters of this run open, so that they are Keel's guess."""
        return self.grid is None and spec.algorithm.name in _read_recipes()["guessed"].get(spec.data.name, [])


class Item(_Table):
    """A table or a figure."""

    name: str
    kind: Literal["table", "figure"]
    number: str
    """What the paper calls it; empty for what Keel adds."""
    label: str = ""
    """Its label in the paper's source."""
    title: str
    shows: str
    view: str
    """How it is made of its parts: a function of views.py."""
    against: str = ""
    """The field on the x-axis of such a figure."""
    finds: str = ""
    """What the paper says it shows, where it is a picture without numbers."""
    paper: list[Part] = []
    desktop: list[Part] = []
    smoke: list[Part] = []

    def parts(self, scale: Scale) -> list[Part]:
        return {"paper": self.paper, "desktop": self.desktop, "smoke": self.smoke}[scale]


@cache
def items() -> dict[str, Item]:
    """All of them, in the paper's order."""
    table = _read_recipes()
    named = {name: item for name, item in table.items() if name not in SHARED}
    expanded = {name: _expanded(item, table["methods"], table["settings"]) for name, item in named.items()}
    return {name: Item(name=name, **item) for name, item in expanded.items()}


def seconds_of(spec: Spec) -> float | None:
    """What a run takes on two cores of a desktop, roughly; None where nobody has measured."""
    known = _read_recipes()["seconds"].get(f"{spec.data.name}-{spec.model.name}")
    if known is None:
        return None
    if spec.algorithm.name == "centralized":  # a round is an epoch over all data, on one of the cores
        known *= 2 / spec.participation.rate
    return spec.rounds * known


@cache
def _read_recipes() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("recipes.toml").read_text(encoding="utf-8"))


def find(name: str) -> Item:
    """The item of that name, or of that number in the paper."""
    numbers = {item.number.lower(): item for item in items().values() if item.number}
    if name not in items() and name.lower() not in numbers:
        raise unknown("paper", name, items())
    return items().get(name) or numbers[name.lower()]


@cache
def printed_title(printed: str) -> str:
    """What a setting of the paper's is called, by where its numbers are in printed.toml."""
    titles = (setting["title"] for setting in _read_recipes()["settings"].values() if setting.get("printed") == printed)
    return next(titles, printed)


def check_scale(item: Item, scale: Scale) -> None:
    """Whether it has a recipe at that scale: what Keel adds to the paper has none at the paper's."""
    if item.number == "" and scale == "paper":
        raise KeelError(f"--scale: {item.name} is not in the paper; accepted: desktop, smoke")


def _expanded(item: dict[str, Any], groups: Mapping[str, list[str]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The item with the groups of methods and the settings that it names written out."""
    result = dict(item)
    for scale in SCALES:
        result[scale] = []
        for part in item.get(scale, []):
            setting = settings[part["setting"]] if "setting" in part else {}
            own = {k: v for k, v in part.items() if k != "setting"}
            whole = {**setting, **own, "spec": merge(setting.get("spec", {}), part.get("spec", {}))}
            if isinstance(whole.get("methods"), str):
                whole["methods"] = groups[whole["methods"]]
            result[scale].append(whole)
    return result


def _read(method: str) -> tuple[str, list[str]]:
    """A method's name and its own fields."""
    name, *own = method.split()
    return name, own
