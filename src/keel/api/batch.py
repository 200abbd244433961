"""What keel.compare and keel.sweep share: the spec of all runs, values, the number of processes, Ctrl-C."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from keel.algorithms import Algorithm
from keel.config.schema import Spec
from keel.errors import Interrupted, KeelError
from keel.runs.objects import RunObjects
from keel.runs.passed import table_of
from keel.signals import raising


def shared_table(
    spec: Spec | Mapping[str, Any] | str | Path | None, objects: RunObjects, algorithm: Algorithm | None = None
) -> dict[str, Any]:
    """The spec of all runs as a table, in which "custom" names the objects that are passed.

    Raises:
        KeelError: The spec sets a field that an object replaces.
    """
    seed = spec.seed if isinstance(spec, Spec) else 0
    made = {"sampler": objects.made("sampler", seed), "algorithm": algorithm}  # a sampler has the participation rate
    return table_of(spec, {**objects.passed, **made})


def plain_values(values: Any) -> Any:
    """The values of a field as a TOML table has them: arrays and tuples become lists, NumPy's numbers plain ones."""
    if isinstance(values, np.ndarray):
        return values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [value.item() if isinstance(value, np.generic) else value for value in values]
    return values


def check_workers(workers: int | None) -> None:
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise KeelError(f"workers must be a number of processes, at least 1 (got {workers!r})")


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Raise a KeyboardInterrupt with advice if Ctrl-C, SIGTERM or SIGHUP ended the runs."""
    try:
        with raising():
            yield
    except Interrupted:
        raise KeyboardInterrupt("every run has saved its last round; the same call continues") from None
