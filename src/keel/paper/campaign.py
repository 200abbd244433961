"""A campaign: the parts of recipes in order of their value, run one after the other within a time budget."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from keel.paper.estimate import count_runs
from keel.paper.execution import missing_data, run_parts
from keel.paper.recipes import Part, Recipe, Scale, campaign_order, find_recipe
from keel.paper.reported import Reported
from keel.paper.run_index import RunIndex
from keel.units import duration


@dataclass(frozen=True)
class Step:
    """A part of a recipe, with what is left to run of it."""

    recipe: Recipe
    part: Part
    runs: int
    """Reported runs that have not finished."""
    trials: int
    """Runs that are left of its searches."""
    seconds: float | None
    """The approximate wall-clock time; None if it is not known."""
    missing: str | None
    """How to get its data set, if it is not installed."""

    @property
    def left(self) -> bool:
        return bool(self.runs or self.trials)

    def as_dict(self) -> dict[str, Any]:
        """Return the step as JSON has it."""
        counts = {"runs": self.runs, "trials": self.trials, "seconds": self.seconds, "missing": self.missing}
        return {"recipe": self.recipe.name, "part": self.part.title, **counts}

    def describe(self) -> str:
        """Return one line on what is left."""
        title = f"{self.recipe.name}: {self.part.title}"
        if not self.left:
            return f"{title}: finished"
        counts = [f"{self.trials} trials" * bool(self.trials), f"{self.runs} runs" * bool(self.runs)]
        time = "time not known" if self.seconds is None else f"about {duration(self.seconds)}"
        needed = f"; {self.missing}" if self.missing else ""
        return f"{title}: {' and '.join(filter(None, counts))} left, {time}{needed}"


def plan_campaign(out: Path, scale: Scale, names: list[str], reported: Reported | None = None) -> list[Step]:
    """Return the parts of the named recipes, by default of all, in the order in which they are to be run.

    Runs that `reported` contains are not made again.
    """
    index = RunIndex(out, reported)
    recipes = [find_recipe(name) for name in names or campaign_order()]
    return [_step(recipe, part, index) for recipe in recipes for part in recipe.parts(scale) if part.methods]


def run_campaign(
    steps: list[Step],
    out: Path,
    hours: float,
    quiet: bool,
    report: Callable[[str], None],
    reported: Reported | None = None,
) -> list[Step]:
    """Run what is left, in order, until the hours are over, and return the steps with what is left then.

    No run is started after that time; those that have started are finished. An interrupted campaign is continued by
    the same call. A step whose data set is not installed is skipped.
    """
    until = monotonic() + 3600 * hours
    for step in steps:
        if step.left and not step.missing and monotonic() < until:
            report(step.describe())
            run_parts([step.part], out, None, quiet, until, reported)
    index = RunIndex(out, reported)
    return [_step(step.recipe, step.part, index) for step in steps]


def next_steps(steps: list[Step]) -> Iterator[Step]:
    """Return the steps that can be run and have not finished."""
    return (step for step in steps if step.left and not step.missing)


def _step(recipe: Recipe, part: Part, index: RunIndex) -> Step:
    counts = count_runs([part], index)
    missing = next(iter(missing_data([part]).values()), None)
    return Step(recipe, part, counts["runs"] - counts["there"], counts["searched"], counts["seconds"], missing)
