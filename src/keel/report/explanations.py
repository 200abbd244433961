"""The sentences under a results table: what its columns mean, and which fields differ between its methods."""

from collections.abc import Iterable
from typing import Any

from keel.report.comparison import Comparison, Setting
from keel.units import percent


def explanation(comparison: Comparison, interval: bool = False) -> str:
    """Explain the columns of the results table."""
    spread = "95 % confidence interval" if interval else "standard deviation"
    text = f"Accuracy: average over the last rounds of each seed, then mean ± {spread} over seeds."
    targets = {target for target in comparison.targets if target is not None}
    if not targets:
        return text
    baseline = next((m.label for m in comparison.methods if comparison.baseline in m.names), None)
    goal = percent(min(targets)) if len(targets) == 1 else "the target"
    if comparison.target is None:
        source = baseline if len(targets) == 1 else comparison.baseline
        goal += f", the final accuracy of {source}" + (" in the same setting" if len(targets) > 1 else "")
    text += f" Rounds and bytes: until accuracy, averaged over {comparison.window} rounds, first reaches {goal}."
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
