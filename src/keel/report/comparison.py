"""A comparison of methods: settings, targets, and the rows of the results table."""

from collections.abc import Collection, Hashable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config.network import Network
from keel.config.overrides import flatten
from keel.config.schema import CUSTOM
from keel.core.records import COMPLETE, PrimaryMetric
from keel.errors import KeelError, unknown_name
from keel.report.loaded_run import LoadedRun, Skipped, Table, load_run, load_runs
from keel.report.loading import distinguishing_fields, labels_of, load_methods, varied_fields
from keel.report.method import Method
from keel.report.significance import Difference, paired_difference
from keel.report.target import cost, saving
from keel.runs.folder import RunFolder
from keel.runs.frames import make_frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Setting:
    """Methods of a comparison that are comparable: they share data, model, participation, rounds and evaluation."""

    heading: str
    fields: Table
    """The fields in which it differs from the other settings."""
    indices: list[int]
    """Indices of its methods in the comparison."""
    labels: list[str]
    """Labels of its methods, as short as they can be within the setting."""
    differing: dict[str, list[Any]]
    """Fields of the spec, other than the algorithm's, in which its methods differ: a value for each method.

    Fields that every label names are left out: they were varied on purpose.
    """

    @property
    def title(self) -> str:
        return f"{self.heading}: {self.description}" if self.fields else self.heading

    @property
    def description(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.fields.items())


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods with their targets: the final value of the baseline in the same setting, or one number for all.

    In a notebook it is shown as curves and a table.
    """

    methods: list[Method]
    """The methods: the runs that differ only in the seed, with their statistics over seeds."""
    baseline: str
    """The name or the title of the algorithm with which the others are compared."""
    target: float | None = None
    """The target of all methods, if it is a number."""
    skipped: list[Skipped] = field(default_factory=list)
    """Runs that were left out because they cannot be read, each with its `path` and `reason`."""

    def __repr__(self) -> str:
        return f"<keel.Comparison: {', '.join(method.label for method in self.methods)}; {len(self.paths)} runs>"

    @property
    def paths(self) -> list[Path]:
        """The folders of all runs."""
        return [run.path for method in self.methods for run in method.runs]

    @property
    def evaluated(self) -> bool:
        """Whether any method has an evaluation; all runs may have diverged before their first."""
        return any(len(method.rounds) for method in self.methods)

    def baseline_of(self, method: Method) -> Method | None:
        """Return the best run of the baseline in the setting of `method`, or None."""
        return self._baselines.get(method.setting_key)

    @cached_property
    def _baselines(self) -> dict[Hashable, Method]:
        """The best run of the baseline in each setting that has one."""
        best: dict[Hashable, Method] = {}
        for method in self.methods:
            if self.baseline in method.names:
                best[method.setting_key] = max(best.get(method.setting_key, method), method, key=lambda m: m.score)
        return best

    @property
    def metrics(self) -> list[PrimaryMetric]:
        """The primary metrics of the methods, each once."""
        return list(dict.fromkeys(method.primary for method in self.methods))

    @property
    def window(self) -> int:
        """Rounds over which metrics are averaged before they are compared with a target: the most of all methods."""
        return max(method.window for method in self.methods)

    @cached_property
    def settings(self) -> list[Setting]:
        """The groups of comparable methods, in the order of their first method."""
        by_key: dict[Hashable, list[int]] = {}
        for index, method in enumerate(self.methods):
            by_key.setdefault(method.setting_key, []).append(index)
        groups = list(by_key.values())
        tables = [flatten(self.methods[group[0]].setting) for group in groups]
        varied = {field for field in varied_fields(tables) if field not in ("data.name", "model.name", "task")}
        return [self._setting(group, table, varied) for group, table in zip(groups, tables, strict=True)]

    def _setting(self, indices: list[int], table: Table, varied: set[str]) -> Setting:
        runs = [self.methods[index].runs[0] for index in indices]
        labels = [self.methods[index].label for index in indices]
        if len(indices) < len(self.methods):  # the title of the setting names what its methods have in common
            labels = labels_of(runs)
        fields = {key: value for key, value in table.items() if key in varied}
        return Setting(_heading(runs[0], table), fields, indices, labels, differing_fields(runs))

    @cached_property
    def varied(self) -> list[str]:
        """The fields that distinguish settings, or methods of the same algorithm."""
        tables = [{k: v for k, v in setting.fields.items() if k != "metric"} for setting in self.settings]
        tables += distinguishing_fields([method.runs[0] for method in self.methods])
        return list(dict.fromkeys(key for table in tables for key in table))

    @cached_property
    def targets(self) -> list[float | None]:
        """The target of each method."""
        if self.target is not None:
            return [self.target] * len(self.methods)
        baselines = [self.baseline_of(method) for method in self.methods]
        return [baseline.value_mean if baseline else None for baseline in baselines]

    def rows(self) -> list[dict[str, Any]]:
        """Return the results table, one row per method: what `keel compare --json` prints."""
        return [dict(row) for row in self._rows]

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        differing: dict[int, Table] = {}
        for setting in self.settings:
            for column, index in enumerate(setting.indices):
                differing[index] = {key: values[column] for key, values in setting.differing.items()}
        pairs = zip(self.methods, self.targets, strict=True)
        return [self._row(method, target, differing[index]) for index, (method, target) in enumerate(pairs)]

    def to_frame(self) -> "pandas.DataFrame":
        """Return the results as a pandas DataFrame: all numbers, unrounded, one row per method."""
        return make_frame(self.rows())

    def to_markdown(self, interval: bool = False) -> str:
        """Return the results table as Markdown, one table per setting, and the fields in which methods differ.

        Args:
            interval: Show 95 % confidence intervals instead of standard deviations, and the differences from the
                baseline.
        """
        from keel.report import tables  # which imports this module

        return tables.markdown_text(self, interval)

    def to_latex(self, interval: bool = False) -> str:
        """Return the results table as LaTeX, which requires the package booktabs.

        Args:
            interval: Show 95 % confidence intervals instead of standard deviations, and the differences from the
                baseline.
        """
        from keel.report import tables

        return tables.latex_text(self, interval)

    def ranks(self) -> list[int | None]:
        """Return the rank of each method in its setting, from 1; None for one that did not finish."""
        ranks: list[int | None] = [None] * len(self.methods)
        for setting in self.settings:
            scores = [self.methods[index].score for index in setting.indices]
            for index, rank in zip(setting.indices, ranks_of(scores), strict=True):
                ranks[index] = None if self.methods[index].value_mean is None else rank
        return ranks

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from keel.report.notebook import comparison_html  # imports the chart libraries, which a table does not need

        return comparison_html(self)

    def _row(self, method: Method, target: float | None, differing: Table) -> dict[str, Any]:
        baseline, metric, fields = self.baseline_of(method), method.primary.name, flatten(method.table)
        spent = method.reaches(target) if target is not None else None
        reference = baseline.reaches(target) if baseline and target is not None else None
        row = {
            "algorithm": method.algorithm,
            "label": method.label,
            "fields": {key: fields.get(key) for key in self.varied},
            "differing": differing,
            "seeds": len(method.seeds),
            "status": method.status,
            "metric": metric,
            "maximize": method.primary.maximize,
            f"{metric}_mean": method.value_mean,
            f"{metric}_std": method.value_std,
            f"{metric}_interval": method.value_interval,
            f"{metric}_seeds": method.final,
            "target": target,
            "rounds_to_target": spent.rounds if spent else None,
            "rounds_to_target_seeds": method.reaches_by_seed(target) if target is not None else None,
            "bytes_to_target": spent.bytes if spent else None,
            "seconds_to_target": spent.seconds if spent else None,
            "bytes_total": method.total.bytes,
            "rounds_saved": saving(spent.rounds, reference.rounds) if spent and reference else None,
            "bytes_saved": saving(spent.bytes, reference.bytes) if spent and reference else None,
        }
        if (difference := _difference(method, baseline)) is not None:
            row[f"{metric}_difference"] = asdict(difference)
        for name, series in method.other.items():
            row |= {f"{name}_mean": series.mean, f"{name}_std": series.std}
        for name in ("mean", "std", "worst_decile", "best_decile"):
            if name in method.clients:
                row[f"clients_{name}"] = method.clients[name].mean
        ended = method.status in (*COMPLETE, "diverged") and method.total.rounds
        if baseline is not None and target is not None and baseline.status in COMPLETE and ended:
            row["cost"] = asdict(cost(spent, method.budget, reference or baseline.budget))
        return row


def _difference(method: Method, baseline: Method | None) -> Difference | None:
    """Return the paired difference of a method from its baseline; None without two seeds in common."""
    if baseline is None or baseline is method or method.final is None or baseline.final is None:
        return None
    pair = (dict(zip(each.seeds, each.final or [], strict=True)) for each in (method, baseline))
    difference = paired_difference(*pair)
    return difference if difference is not None and difference.measured else None


def ranks_of(scores: list[float]) -> list[int]:
    """Return the rank of each score, from 1 for the largest; equal scores have the same rank."""
    ordered = sorted(scores, reverse=True)
    first = {score: place for place, score in reversed(list(enumerate(ordered, start=1)))}
    return [first[score] for score in scores]


def differing_fields(runs: list[LoadedRun]) -> dict[str, list[Any]]:
    """Return the fields in which these runs differ, with the value of each run; see `Setting.differing`."""
    tables = [flatten({k: v for k, v in run.shared.items() if k != "algorithm"}) for run in runs]
    in_labels = distinguishing_fields(runs)
    return {
        field: [table.get(field) for table in tables]
        for field in varied_fields(tables)
        if not all(field in label for label in in_labels)
    }


def _heading(run: LoadedRun, table: Table) -> str:
    """The names of the data set and of the model; of objects that were passed in Python, what is recorded of them."""
    data, model = table["data.name"], table["model.name"]
    if data == CUSTOM:
        recorded = (run.client_statistics or {}).get("name", CUSTOM)
        data = "own data" if recorded == CUSTOM else recorded
    if model == CUSTOM:
        model = "own model" if run.model_class is None else run.model_class
    return f"{data}, {model}"


def compare(
    folders: list[RunFolder],
    baseline: str | None = None,
    target: float | None = None,
    network: Network | None = None,
    require_evaluation: bool = True,
    skip_damaged: bool = False,
) -> Comparison:
    """Compare the runs in these folders; the baseline is FedAvg unless another algorithm is named.

    With a network (given here, or the same one in all specs), wall-clock time is that of a federation on it.

    Args:
        require_evaluation: Refuse runs none of which was evaluated, because there is nothing to draw.
        skip_damaged: Leave out runs that cannot be read and list them in `skipped`; otherwise they are refused.

    Raises:
        KeelError: A run cannot be read (with `skip_damaged`: none can), or an argument is not valid.
    """
    runs, skipped = load_runs(folders) if skip_damaged else ([load_run(folder) for folder in folders], [])
    if not runs:
        raise KeelError(f"no run can be read; {len(skipped)} skipped, the first is {skipped[0]}")
    comparison = Comparison(load_methods(runs, network), baseline or "fedavg", target, skipped)
    if require_evaluation and not comparison.evaluated:
        metric = comparison.methods[0].primary.label
        raise KeelError(f"run {str(runs[0].path)!r} has no {metric} yet; report on runs with an evaluation")
    names = {name for method in comparison.methods for name in method.names}
    if baseline is not None and baseline not in names:
        raise unknown_name("--target", baseline, names)
    if target is not None:
        check_target(target, comparison.metrics)
    return comparison


def check_target(target: float, metrics: Collection[PrimaryMetric]) -> None:
    """Raise a KeelError unless the number is a target for runs with these primary metrics."""
    if len(metrics) > 1:
        names = ", ".join(sorted(metric.label for metric in metrics))
        raise KeelError(f"--target must name an algorithm for runs with different metrics ({names}; got {target:g})")
    for metric in metrics:
        if metric.is_fraction and not 0 < target <= 1:
            raise KeelError(
                f"--target must be above 0 and at most 1 for {metric.label}, as in 0.8, or an algorithm "
                f"(got {target:g})"
            )
