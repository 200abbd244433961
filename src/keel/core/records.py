"""The records of a run: a line of metrics.jsonl, summary.json and environment.json."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from keel.units import number, percent

COMPLETE = frozenset({"finished", "stopped"})
"""The statuses of runs that have a result: all rounds ran, or a rule of `[stop]` ended the run."""
OFFLINE = "offline"
"""The reason in `dropped` of a client to which nothing was sent."""
FRACTIONS = frozenset(
    {
        "accuracy",
        "auroc",
        "average_precision",
        "balanced_accuracy",
        "calibration_error",
        "exact_match",
        "f1",
        "f1_score",
        "fbeta_score",
        "hamming_distance",
        "jaccard_index",
        "precision",
        "recall",
        "specificity",
    }
)
"""Metrics that are between 0 and 1 by definition and shown in percent."""
ABBREVIATIONS = {name: name.upper() for name in ("auroc", "f1", "mae", "mse", "rmse")} | {"r2": "R²"}


def is_fraction(name: str) -> bool:
    """Whether the metric with this key is shown in percent; top-k accuracies are, as in "top_5_accuracy"."""
    plain = re.sub(r"^(binary|multiclass|multilabel)_|_?top_?\d+_?", "", name)
    return plain in FRACTIONS or not plain


def metric_label(name: str) -> str:
    """The key of a metric as people write it: "test loss", "F1 score"."""
    return " ".join(ABBREVIATIONS.get(word, word) for word in name.split("_"))


@dataclass(frozen=True)
class PrimaryMetric:
    """The metric by which runs are compared: its key in a record, and which direction is better."""

    name: str = "accuracy"
    maximize: bool = True

    @property
    def is_fraction(self) -> bool:
        """Whether it is shown in percent."""
        return is_fraction(self.name)

    @property
    def label(self) -> str:
        return metric_label(self.name)

    @property
    def heading(self) -> str:
        """The label at the start of a sentence."""
        return self.label[:1].upper() + self.label[1:]

    def text(self, value: float | None, spread: float | None = None) -> str:
        """A value, with its spread if there is one, as people read it."""
        return (percent if self.is_fraction else number)(value, spread)

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.maximize else value < than

    def reached(self, value: float, target: float) -> bool:
        """Return whether `value` is at least as good as the target."""
        return value == target or self.is_better(value, target)


def primary_metric(recorded: Mapping[str, Any]) -> PrimaryMetric:
    """The primary metric that an environment or a summary records; accuracy for runs that record none."""
    if "metric" not in recorded:
        return PrimaryMetric()
    return PrimaryMetric(recorded["metric"], recorded["maximize"])


def final_value(summary: Mapping[str, Any]) -> float | None:
    """The primary metric over the last rounds; None unless the run finished. Earlier versions recorded accuracy."""
    return summary["value"] if "metric" in summary else summary["accuracy"]


def last_value(summary: Mapping[str, Any]) -> float | None:
    """The primary metric after the last evaluation. Earlier versions recorded accuracy."""
    return summary["last_value"] if "metric" in summary else summary["last_accuracy"]


def end_value(summary: Mapping[str, Any]) -> float | None:
    """The final value, or for a run that did not finish, the value after the last evaluation."""
    final = final_value(summary)
    return last_value(summary) if final is None else final


class Record(TypedDict, total=False):
    """One round, a line of metrics.jsonl. It holds no times, so that equal runs have equal records.

    Observers and hooks may add keys of their own.
    """

    round: int
    cohort: list[int]
    """The clients whose reports were aggregated, in the order of aggregation."""
    lr: float
    """The local learning rate."""
    bytes_down: int
    bytes_up: int
    dropped: dict[str, str]
    """Clients that did not answer or whose reply was rejected, with the reason."""
    norms: dict[str, float | None]
    """With `server.clip`: the Euclidean norm of each client's report before clipping, over its large tensors."""
    clipped: list[int]
    """The clients whose report, probe or buffers were clipped; missing if there are none."""
    rejected: list[int]
    """The clients of `dropped` whose norm was far above the median; missing if there are none."""
    federation_seconds: float
    """With `availability.step_seconds`: the modelled duration of the round on the spec's network."""
    epsilon: float | None
    """With `[privacy]`: epsilon at `privacy.delta` of all that was released so far; None if it is infinite."""
    clip_norm: float
    """With `privacy.quantile`: the clipping norm of the round."""
    train_loss: float | None
    """None if nobody answered."""
    diverged: bool
    drift: float | None
    momentum_angle: float | None
    deviation: dict[str, float | None]
    test_loss: float
    accuracy: float
    class_accuracy: list[float | None]
    clients: dict[str, Any]
    """The primary metric over the clients' own held-out examples: mean, std, deciles and counts."""
    bytes_evaluation: int
    losses: dict[str, float]
    """In a federation, each site's training loss."""
    test_examples: int
    """In a federation, the test examples of the sites behind test loss and accuracy."""
    evaluation_missing: list[int]
    """In a federation, the sites whose evaluation is missing."""


class Summary(TypedDict):
    """How a run ended: summary.json."""

    status: str
    """finished, stopped (by a rule of `[stop]`), diverged or interrupted."""
    stop_reason: str | None
    """The rule that stopped the run; None unless its status is stopped."""
    rounds: int
    metric: str
    """The key of the primary metric in the records."""
    maximize: bool
    """Whether larger values of the primary metric are better."""
    value: float | None
    """The primary metric's mean over the last `evaluation.last` rounds, at most a third of the rounds if the run
    stopped; None unless it finished or stopped."""
    last_value: float | None
    """The primary metric after the last round that was evaluated."""
    best_round: int | None
    """With `evaluation.select`, the round of the best model by the primary metric."""
    best_value: float | None
    accuracy: float | None
    """Accuracy's mean over the same rounds as `value`."""
    last_accuracy: float | None
    test_loss: float | None
    class_accuracy: list[float | None] | None
    bytes_down: int
    bytes_up: int
    seconds: float
    engine: str
    seed: int
    parameters: int
    model_sha256: str
    record_crc32: NotRequired[str]
    """The checksum of the last record, by which a summary of another run is detected."""
    noise_multiplier: NotRequired[float]
    """With `[privacy]`: the one of the spec, or the one that `privacy.epsilon` set."""
    epsilon: NotRequired[float | None]
    """With `[privacy]`: that of the last record."""
    idle_sites: NotRequired[dict[str, str]]
    """In a federation, the sites that contributed nothing in their last rounds, with the reason."""
    outliers: NotRequired[dict[str, dict[str, list[int]]]]
    """In a federation, the rounds in which a site's norm or loss was far above that of the other sites."""


class Versions(TypedDict):
    """The software and the machine that a run's result may depend on."""

    keel: str
    source_sha256: str
    python: str
    torch: str
    numpy: str
    platform: str
    processor: str
    cores: int | None


class Environment(Versions, total=False):
    """What a run used besides its spec: environment.json."""

    format: int
    """Of the run folder; missing in folders of earlier versions."""
    engine: str
    engine_reason: str
    """Why `engine.name = "auto"` trains one client at a time; missing if it does not."""
    device: str
    layout: str
    workers: int
    processes: int
    """The processes that trained concurrently in a full cohort."""
    bit_identical: bool
    """Whether the engine's results equal those of `serial` to the bit."""
    algorithm_class: str
    sampler: str
    """The class and the cohort size of a sampler that was passed in Python."""
    cohorts_sha256: str
    title: str
    """The algorithm's name as people write it."""
    loss: str
    optimizer: str
    """The class of the local optimiser and a fingerprint of its steps; missing for plain SGD."""
    metrics: str
    """"custom" if metrics were passed in Python."""
    metric: str
    """The key of the primary metric in the records."""
    maximize: bool
    parameters: int
    initial_sha256: str
    examples_sha256: str
    partition_sha256: str
    training: str
    """A federation's identifier of this run."""
    sites: list[dict[str, Any]]
    members: list[int]
    """The sites of a federation that take part, if some have joined or left."""
