"""The sentences under a results table: what its columns mean, and which fields differ between its methods."""

from collections.abc import Iterable
from typing import Any

from keel.report.comparison import Comparison, Setting
from keel.report.target import MIN_EVALUATIONS


def _window(comparison: Comparison) -> str:
    """The rounds, or evaluations if these are fewer than the minimum, over which a metric is averaged."""
    rounds = comparison.window
    return f"{rounds} rounds" if rounds >= MIN_EVALUATIONS else f"{MIN_EVALUATIONS} evaluations"


def explanation(comparison: Comparison, interval: bool = False) -> str:
    """Explain the columns of the results table."""
    spread = "95 % confidence interval" if interval else "standard deviation"
    names = " and ".join(metric.label for metric in comparison.metrics)
    text = (
        f"{names[:1].upper()}{names[1:]}: average over the last rounds of each seed, then mean ± {spread} over seeds."
    )
    if any(method.clients for method in comparison.methods):
        text += " Over clients: the same average, mean over seeds."
    if any(method.other for method in comparison.methods):
        text += " Other metrics: the same average, mean ± standard deviation over seeds."
    if interval and any(f"{row['metric']}_difference" in row for row in comparison.rows()):
        text += " Differences: mean over common seeds; the intervals are not corrected for the number of methods."
    targets = {target for target in comparison.targets if target is not None}
    if not targets:
        return text
    baseline = next((m.label for m in comparison.methods if comparison.baseline in m.names), None)
    goal = comparison.metrics[0].text(min(targets)) if len(targets) == 1 else "the target"
    if comparison.target is None:
        source = baseline if len(targets) == 1 else comparison.baseline
        goal += f", the final {names} of {source}" + (" in the same setting" if len(targets) > 1 else "")
    text += f" Rounds and bytes: until {names}, averaged over {_window(comparison)}, first reaches {goal}."
    if baseline is not None:
        text += f" Δ: reduction (↓) or increase (↑) relative to {baseline}."
    return text


def difference_notes(comparison: Comparison) -> list[str]:
    """Return the fields other than the algorithm's that differ between methods, one line for each.

    Each method has its own defaults for a data set, so that a table may compare learning rates as much as methods.
    """
    notes = {setting.title: setting_notes(setting) for setting in comparison.settings}
    distinct = {tuple(lines) for lines in notes.values()}
    if len(distinct) == 1:
        return list(distinct.pop())
    return [f"{title}: {line}" for title, lines in notes.items() for line in lines]


def setting_notes(setting: Setting) -> list[str]:
    """Return the differing fields of one setting: `local.lr differs: 0.5 (FedAvg, FedProx), 0.3 (GHBM)`."""
    return [
        f"{field} differs: {_by_value(zip(setting.labels, values, strict=True))}"
        for field, values in setting.differing.items()
    ]


def _by_value(pairs: Iterable[tuple[str, Any]]) -> str:
    groups: dict[str, list[str]] = {}
    for label, value in pairs:
        groups.setdefault("unset" if value is None else str(value), []).append(label)
    return ", ".join(f"{value} ({', '.join(labels)})" for value, labels in groups.items())
