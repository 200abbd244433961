"""The result of a run: what keel.run and keel.resume return."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from keel import registry
from keel.core.records import Record, Summary
from keel.core.training_state import TrainingState
from keel.runs.build import Training
from keel.runs.folder import RunFolder
from keel.runs.frames import make_frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Run:
    """A run that has ended or was interrupted: its folder, its summary and its trained model."""

    path: Path
    """The run folder."""
    summary: Summary
    """How the run ended, as in summary.json."""
    module: nn.Module
    """The trained model."""

    @property
    def status(self) -> str:
        """finished, diverged or interrupted."""
        return self.summary["status"]

    @property
    def accuracy(self) -> float | None:
        """The mean over the last `evaluation.last` rounds; None for a run that did not finish."""
        return self.summary["accuracy"]

    @property
    def value(self) -> float | None:
        """The primary metric's mean over the last `evaluation.last` rounds; None for a run that did not finish."""
        return self.summary["value"]

    @property
    def records(self) -> list[Record]:
        """A record per round, as in metrics.jsonl."""
        return RunFolder(self.path).records()

    def to_frame(self) -> "pandas.DataFrame":
        """The records as a pandas DataFrame, one row per round."""
        return make_frame(self.records)

    def _repr_html_(self) -> str:
        """The curve and the summary, for a notebook."""
        if not registry.known("run", {}, "keel.displays"):  # keel.report, which registers it, is above this package
            return f"<pre>{escape(repr(self))}</pre>"
        builtin: dict[str, Any] = {}
        run_html = registry.find("display", "run", builtin, "keel.displays")
        return run_html(RunFolder(self.path), self.summary)


def ended_run(folder: RunFolder, training: Training, state: TrainingState) -> Run:
    """The result of an ended or interrupted run, with the model of `state`."""
    evaluator = training.loop.engine.evaluator
    evaluator.load_weights(state.server["theta"], state.buffers)
    summary = folder.summary
    assert summary is not None
    return Run(folder.path, summary, evaluator.model.plain_module())
