"""An index of run folders by experiment, so that tables and figures share their runs."""

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from keel.config.overrides import flatten
from keel.config.schema import ServerSpec, Spec
from keel.runs.folder import RunFolder
from keel.runs.parallel import Job

ADDED_TO_SERVER = {"largest_weight": ServerSpec.model_fields["largest_weight"].default}
"""Fields of `server` that were added after results were stored, with their defaults."""


class Results(Protocol):
    """Stored results of runs and searches."""

    searches: Path

    def has(self, spec: Spec) -> bool: ...


class RunIndex:
    """The run folders below `path`, indexed by experiment: which recipe started a run does not matter.

    A finished run counts as a result whichever version of Keel made it; its environment.json records the version.
    A run in `reported` counts as finished too.
    """

    def __init__(self, path: Path, reported: Results | None = None):
        self.path, self.reported = path, reported
        # a hidden folder is one that a process was killed while making
        folders = (RunFolder(file.parent) for file in sorted((path / "runs").glob("[!.]*/spec.toml")))
        self.folders = {experiment_key(folder.spec): folder for folder in folders}

    def find(self, spec: Spec) -> RunFolder | None:
        """Return the folder of the run of `spec`, finished or not, or None."""
        return self.folders.get(experiment_key(spec))

    def finished(self, specs: Iterable[Spec]) -> list[RunFolder]:
        """Return the folders of the finished runs among `specs`."""
        return [folder for spec in specs if (folder := self.find(spec)) is not None and folder.ended]

    def unfinished(self, specs: Iterable[Spec]) -> list[Spec]:
        """Return the specs without a finished run, without duplicates."""
        missing: dict[str, Spec] = {}
        for spec in specs:
            folder = self.find(spec)
            if (folder is None or not folder.ended) and not (self.reported and self.reported.has(spec)):
                missing[experiment_key(spec)] = spec
        return list(missing.values())

    def job(self, spec: Spec) -> Job:
        """Return the spec with the folder in which its run is, or will be."""
        folder = self.find(spec)
        name = f"{spec.label}-{sha256(experiment_key(spec).encode()).hexdigest()[:8]}"
        return Job(spec, folder.path if folder else self.path / "runs" / name)


def experiment_key(spec: Spec) -> str:
    """Return a text that is equal for equal experiments."""
    return json.dumps(_without_added(spec.experiment), sort_keys=True)


def spec_fields(spec: Spec) -> dict[str, Any]:
    """Return the fields of a spec by dotted name, without the seed and the trackers."""
    return flatten(_without_added(spec.model_dump(exclude_none=True, exclude={"seed", "tracking"})))


def _without_added(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a spec without the fields that stored results lack, if they have their defaults."""
    server = {k: v for k, v in table["server"].items() if ADDED_TO_SERVER.get(k) != v}
    return {**table, "server": server}
