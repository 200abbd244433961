"""What measurements say about a claim: paired comparisons on each task, corrected for their number, and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Literal

from keel.report.significance import LEVEL, Difference, holm, mean_over_tasks, paired_difference

Result = Literal["for", "against", "open", "one seed"]
Verdict = Literal["supported", "partly", "not supported", "not run"]
Unit = Literal["points", "ratio"]

RULES = """
A difference is paired: both methods have the same seeds, and with them the same partition, cohorts and initial model.
Its 95 % interval and its p value are by Student's t over seeds. A task is *for* a claim if a method that the claim
favours is above all methods that it is compared with (p < 0.05), *against* it if each favoured method is below one of
the others, and *open* otherwise. A single seed has no interval and does not count.

Of several favoured methods, the one with the best score in its search is tested; the search has other seeds and
held-out examples, so that the selection does not bias the test. Without a search all favoured methods are tested, and p
is multiplied by their number. For the claim, the largest of the p values against the others counts; against it, the
smallest times their number. Holm's procedure corrects for the number of tasks. The table shows the difference from the
strongest of the other methods, which is selected by the reported seeds: this works against the claim.

**Supported**: all tasks are for the claim. **Partly**: more tasks are for it than against it. **Not supported**:
otherwise. **Not run**: no task has two seeds. The effect is the mean over the tasks; its 95 % interval is over seeds,
for these tasks.
"""
"""How a verdict comes about, for the reader."""


@dataclass(frozen=True)
class Contrast:
    """The difference of two methods, positive if the first is better."""

    first: str
    second: str
    difference: Difference
    tolerated: Difference
    """The difference plus the margin by which the first may be worse."""


def contrast(
    first: str, second: str, values: Mapping[int, float], others: Mapping[int, float], margin: float = 0.0
) -> Contrast | None:
    """Return the contrast of two methods by seed, or None if they share no seed."""
    difference = paired_difference(values, others)
    tolerated = paired_difference({seed: value + margin for seed, value in values.items()}, others)
    return None if difference is None or tolerated is None else Contrast(first, second, difference, tolerated)


@dataclass(frozen=True)
class Question:
    """Whether a claim holds on a task: whether one of several favoured methods is above all others."""

    task: str
    favoured: list[list[Contrast]]
    """The contrasts of each favoured method with the others."""
    shown: Contrast | None = None
    """The contrast to show, if it is not the one with the best worst case."""

    @cached_property
    def effect(self) -> Contrast:
        worst = [min(contrasts, key=lambda each: each.difference.mean) for contrasts in self.favoured]
        return self.shown or max(worst, key=lambda each: each.difference.mean)

    @property
    def p_for(self) -> float:
        """The p value of one favoured method being above all others."""
        worst = [
            max(each.tolerated.p if each.tolerated.mean > 0 else 1.0 for each in contrasts)
            for contrasts in self.favoured
        ]
        return min(1.0, len(worst) * min(worst))

    @property
    def p_against(self) -> float:
        """The p value of every favoured method being below one of the others."""
        return max(
            min(1.0, len(contrasts) * min(each.difference.p if each.difference.mean < 0 else 1.0 for each in contrasts))
            for contrasts in self.favoured
        )


@dataclass(frozen=True)
class Outcome:
    """The answer to a question, after the correction for the number of tasks."""

    question: Question
    result: Result
    p: float
    """The smaller of the corrected p values for and against."""


def answer(questions: Sequence[Question]) -> list[Outcome]:
    """Return the outcome of each question."""
    measured = [question for question in questions if question.effect.difference.measured]
    fors, againsts = (holm([getattr(each, name) for each in measured]) for name in ("p_for", "p_against"))
    corrected = {id(each): pair for each, pair in zip(measured, zip(fors, againsts, strict=True), strict=True)}
    outcomes = []
    for question in questions:
        p_for, p_against = corrected.get(id(question), (1.0, 1.0))
        result: Result = "for" if p_for < LEVEL else "against" if p_against < LEVEL else "open"
        outcomes.append(Outcome(question, result if id(question) in corrected else "one seed", min(p_for, p_against)))
    return outcomes


@dataclass(frozen=True)
class Claim:
    """A claim of the paper with its evidence."""

    title: str
    test: str
    """What is compared, on which tasks."""
    questions: list[Question]
    sources: list[str]
    """The results that the questions are from."""
    unit: Unit = "points"

    @cached_property
    def outcomes(self) -> list[Outcome]:
        return answer(self.questions)

    def count(self, result: Result) -> int:
        return sum(outcome.result == result for outcome in self.outcomes)

    @property
    def verdict(self) -> Verdict:
        tasks = len(self.outcomes) - self.count("one seed")
        if tasks == 0:
            return "not run"
        if self.count("for") == tasks:
            return "supported"
        return "partly" if self.count("for") > self.count("against") else "not supported"

    @property
    def effect(self) -> Difference | None:
        """The mean effect over the tasks with an interval."""
        effects = [each.question.effect.difference for each in self.outcomes if each.result != "one seed"]
        return mean_over_tasks(effects) if effects else None

    def lines(self) -> list[list[str]]:
        """Return a line for each task: what is compared, the difference with its interval, the p value, the result."""
        return [
            [
                outcome.question.task,
                f"{outcome.question.effect.first} / {outcome.question.effect.second}",
                effect_text(outcome.question.effect.difference, self.unit),
                p_text(outcome.p) if outcome.result != "one seed" else "-",
                outcome.result,
            ]
            for outcome in self.outcomes
        ]

    def summary(self) -> list[str]:
        """Return the verdict with its counts, the effect with its interval, the tasks and the seeds."""
        seeds = sorted({each.question.effect.difference.seeds for each in self.outcomes})
        names: tuple[Result, ...] = ("for", "open", "against", "one seed")
        counted = {name: count for name in names if (count := self.count(name))}
        counts = ", ".join(f"{count} {'with ' * (name == 'one seed')}{name}" for name, count in counted.items())
        return [
            f"**{self.verdict}**" + (f": {counts}" if counts else ""),
            "-" if self.effect is None else effect_text(self.effect, self.unit),
            str(len(self.outcomes)) if self.outcomes else "-",
            "-" if not seeds else f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}",
        ]


def effect_text(difference: Difference, unit: Unit) -> str:
    """Return a difference in percentage points, or a ratio from a difference of logarithms, with its interval."""
    if unit == "ratio":  # of the first to the second, so that less is better
        smaller = Difference(-difference.mean, -difference.high, -difference.low, difference.p, difference.seeds)
        ratio = smaller.map(exp) if difference.measured else None
        text = f"× {exp(smaller.mean):.2f}"
        return text if ratio is None else f"{text} ({ratio.low:.2f} to {ratio.high:.2f})"
    text = f"{100 * difference.mean:+.1f}"
    return f"{text} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})" if difference.measured else text


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
