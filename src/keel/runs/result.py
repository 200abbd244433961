"""The result of a run: what keel.run, keel.resume and keel.load return."""

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from keel import registry
from keel.config.schema import CUSTOM, Spec
from keel.core.records import Record, Summary
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.build import Training
from keel.runs.folder import RunFolder
from keel.runs.frames import make_frame
from keel.runs.trained import trained_module, trained_tensors

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Run:
    """A run in its folder: its records, its summary and its trained model."""

    path: Path
    """The run folder."""
    _summary: Summary | None
    _module: nn.Module | None = None

    def __repr__(self) -> str:
        return f"<keel.Run {str(self.path)!r}: {self.status}>"

    @property
    def summary(self) -> Summary:
        """How the run ended, as in summary.json.

        Raises:
            KeelError: The run has not ended.
        """
        if self._summary is None:
            raise KeelError(f"run: {str(self.path)!r} has not ended; continue it with keel resume")
        return self._summary

    @property
    def status(self) -> str:
        """finished, stopped (by a rule of `[stop]`), diverged or interrupted; unfinished while it is active."""
        return "unfinished" if self._summary is None else self._summary["status"]

    @property
    def accuracy(self) -> float | None:
        """The mean over the last `evaluation.last` rounds; None for a run that diverged or was interrupted."""
        return None if self._summary is None else self._summary["accuracy"]

    @property
    def value(self) -> float | None:
        """The primary metric's mean over the last `evaluation.last` rounds; None for a run that did not finish."""
        return None if self._summary is None else self._summary["value"]

    @property
    def records(self) -> list[Record]:
        """A record per round, as in metrics.jsonl."""
        return RunFolder(self.path).records()

    def to_frame(self) -> "pandas.DataFrame":
        """The records as a pandas DataFrame, one row per round."""
        return make_frame(self.records)

    @property
    def spec(self) -> Spec:
        """The resolved spec."""
        folder = RunFolder(self.path)
        if folder.table["algorithm"]["name"] == CUSTOM:
            raise KeelError(
                f"spec: the algorithm of this run was passed in Python; its fields are in {folder.path / 'spec.toml'}"
            )
        return folder.spec

    @cached_property
    def module(self) -> nn.Module:
        """The trained module, in evaluation mode.

        Raises:
            KeelError: The run has no checkpoint, or its model was passed in Python and has to be passed to keel.load.
        """
        return trained_module(RunFolder(self.path)) if self._module is None else self._module

    def state_dict(self, best: bool = False) -> dict[str, Tensor]:
        """The trained parameters and buffers by name. It does not require the model's class.

        Args:
            best: Those of the best model that a run with `evaluation.select` has kept, instead of the last one.
        """
        return trained_tensors(RunFolder(self.path), best)

    def _repr_html_(self) -> str:
        """The curve and the summary, for a notebook."""
        displayed = registry.known("run", {}, "keel.displays")  # keel.report, which registers it, is above this package
        if self._summary is None or not displayed:
            return f"<pre>{escape(repr(self))}</pre>"
        builtin: dict[str, Any] = {}
        run_html = registry.find("display", "run", builtin, "keel.displays")
        return run_html(RunFolder(self.path), self._summary)


def load(path: str | Path, *, model: nn.Module | None = None) -> Run:
    """Load a run from its folder, whether it has ended or not.

    Args:
        path: The run's folder.
        model: For a run whose model was passed in Python: a module of the same class. `module` of the result is a copy
            of it with the trained weights.

    Raises:
        KeelError: `path` is not a run folder, or the weights do not fit the model.
    """
    folder = RunFolder.open(Path(path))
    return Run(folder.path, folder.summary, None if model is None else trained_module(folder, model))


def ended_run(folder: RunFolder, training: Training, state: TrainingState) -> Run:
    """The result of an ended or interrupted run, with the model of `state`."""
    evaluator = training.loop.engine.evaluator
    evaluator.load_weights(state.server["theta"], state.buffers)
    summary = folder.summary
    assert summary is not None
    return Run(folder.path, summary, evaluator.model.plain_module())
