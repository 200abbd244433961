"""A file for Prometheus with the state of the training after the last round, replaced as a whole."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.runs.files import write_atomic

MODE = 0o644
"""The node exporter, which reads the file, has another user. The file has no name and no value of an example."""


class MetricsFile:
    """Writes the file after each round.

    Args:
        records: The earlier rounds of a resumed run.
        seconds: Their wall-clock times.
        rounds: The number of rounds of the run.
        sites: The sites that take part.
    """

    def __init__(
        self, path: Path, records: Sequence[Record], seconds: Sequence[float], rounds: int, sites: Sequence[int]
    ):
        self.path, self.records, self.seconds = path, list(records), list(seconds)
        self.rounds, self.sites = rounds, sites

    def __call__(self, record: Record, state: TrainingState, seconds: float) -> None:
        self.records.append(record)
        self.seconds.append(seconds)
        write_atomic(self.path, [self.text().encode()])
        self.path.chmod(MODE)

    def text(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        last, dropped = self.records[-1], {str(site): 0 for site in self.sites}
        for record in self.records:
            for site in record.get("dropped", {}):
                dropped[site] = dropped.get(site, 0) + 1
        bytes_total = {
            "down": sum(record["bytes_down"] for record in self.records),
            "up": sum(record["bytes_up"] for record in self.records),
        }
        lines = [
            *_metric("keel_round", "gauge", "Rounds that are finished.", {"": last["round"]}),
            *_metric("keel_rounds", "gauge", "Rounds of the training.", {"": self.rounds}),
            *_metric("keel_sites", "gauge", "Sites that take part.", {"": len(self.sites)}),
            *_metric("keel_round_sites", "gauge", "Sites in the last round.", {"": len(last["cohort"])}),
            *_metric("keel_dropped_total", "counter", "Dropped replies.", _labels("site", dropped)),
            *_metric("keel_bytes_total", "counter", "Bytes of tensors.", _labels("direction", bytes_total)),
            *_metric("keel_seconds_total", "counter", "Wall-clock time.", {"": sum(self.seconds)}),
        ]
        for name, key in ("keel_norm", "norms"), ("keel_loss", "losses"):
            values: Mapping[str, float | None] = dict(last).get(key, {})  # type: ignore[assignment]
            finite = {str(site): value for site, value in values.items() if value is not None}
            lines += _metric(name, "gauge", f"The {key} of the sites in the last round.", _labels("site", finite))
        return "\n".join(lines) + "\n"


def _labels(name: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{{{name}="{label}"}}': value for label, value in values.items()}


def _metric(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterable[str]:
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {kind}",
        *(f"{name}{label} {value}" for label, value in values.items()),
    ]
