"""The searches for hyper-parameters: a file of scores per method and setting, from which a search continues.

A trial is a run on held-out examples. Its score is kept, its run folder is not: searches have thousands of them.
"""

import json
import shutil
from collections.abc import Collection
from hashlib import sha256
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.config.overrides import flatten
from keel.config.schema import Spec
from keel.core.records import final_value
from keel.errors import KeelError
from keel.paper.lattice import point_key
from keel.paper.recipes import FINAL_SEEDS, FINALISTS, SEARCH_SEEDS, Part
from keel.paper.run_index import experiment_key
from keel.runs.files import write_atomic
from keel.runs.folder import RunFolder
from keel.runs.parallel import Job
from keel.runs.run import find_run
from keel.runs.search_space import Point, name_of

SEARCHES = "searches"
"""The folder of the scores of searches, in the folder of results and in that of runs."""


class Search:
    """The search for the hyper-parameters of one method in one part of a recipe.

    It continues from the scores below `out`, or from those in the folder `stored` if these are more.
    """

    def __init__(self, part: Part, method: str, out: Path, stored: Path | None = None):
        lattice = part.lattice(method)
        assert lattice is not None
        assert part.trials is not None
        self.part, self.method, self.lattice, self.trials = part, method, lattice, part.trials
        [first] = lattice.next_points({}, 1)
        [self.first] = part.trial_specs(method, first, SEARCH_SEEDS[:1])
        fields = [_without(self.first, lattice.axes), sorted(lattice.axes)]
        digest = sha256(json.dumps(fields, sort_keys=True).encode())
        name = f"{self.first.label.rpartition('-seed')[0]}-{digest.hexdigest()[:8]}"
        self.file, self.folder = out / SEARCHES / f"{name}.json", out / "trials" / name
        files = [self.file] if stored is None else [self.file, stored / self.file.name]
        self.ended: list[dict[str, Any]] = max(map(_read, files), key=len)

    def missing(self) -> list[Job]:
        """Return the runs to make next; none if the search has ended."""
        return [
            Job(spec, self.folder / f"{name_of(point)}-seed{seed}")
            for point, seed in self._missing()
            for spec in self.part.trial_specs(self.method, point, [seed])
        ]

    def _missing(self) -> list[tuple[Point, int]]:
        """Return the points and seeds to run next. Their specs are not made: `keel paper list` asks every search."""
        points = self.lattice.next_points(self.scores(), self.trials)
        seeds = SEARCH_SEEDS if points else FINAL_SEEDS
        ended = {(point_key(trial["point"]), trial["seed"]) for trial in self.ended}
        pairs = product(points or self._finalists(), seeds)
        return [(point, seed) for point, seed in pairs if (point_key(point), seed) not in ended]

    def runs_left(self) -> int:
        """Return the number of runs that the search has left, at most."""
        if not self._missing():
            return 0
        finals = min(FINALISTS, self.trials) * len(FINAL_SEEDS)
        return max(1, self.trials * len(SEARCH_SEEDS) + finals - len(self.ended))

    def scores(self) -> dict[str, float]:
        """Return the mean score of each point of which every search seed has ended, in the order of the trials.

        The score of a diverged run is minus infinity.
        """
        runs = self._by_point(SEARCH_SEEDS)
        return {key: fmean(seeds) for key, seeds in runs.items() if len(seeds) == len(SEARCH_SEEDS)}

    def worst(self, point: Point) -> float:
        """Return the score of the worst seed of a point."""
        return min(self._by_point([*SEARCH_SEEDS, *FINAL_SEEDS])[point_key(point)])

    def best(self) -> Point | None:
        """Return the finalist whose worst seed is best, or None if the search has not ended."""
        return None if self._missing() else max(self._finalists(), key=self.worst)

    def _finalists(self) -> list[Point]:
        """Return the points with the best scores, the best first."""
        scores = self.scores()
        return [json.loads(key) for key in sorted(scores, key=lambda key: -scores[key])[:FINALISTS]]

    def _by_point(self, seeds: Collection[int]) -> dict[str, list[float]]:
        """Return the scores of each point with these seeds."""
        runs: dict[str, list[float]] = {}
        for trial in self.ended:
            if trial["seed"] in seeds:
                score = -inf if trial["score"] is None else trial["score"]
                runs.setdefault(point_key(trial["point"]), []).append(score)
        return runs

    def keep(self, folders: Collection[RunFolder]) -> None:
        """Store the scores of runs that have ended, and delete their folders."""
        for folder in folders:
            spec = folder.spec
            fields = flatten(spec.model_dump())
            score = final_value(folder.summary) if folder.summary is not None else None
            point = {field: fields[field] for field in self.lattice.axes}
            self.ended.append({"point": point, "seed": spec.seed, "score": score})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.file, [_lines(self.ended).encode()])
        for folder in folders:
            shutil.rmtree(folder.path)


def remove_older(job: Job) -> None:
    """Remove the folder of an interrupted trial that another version of Keel began: it could not be resumed."""
    if job.path.exists():
        try:
            find_run(job.spec, job.path)
        except KeelError:
            shutil.rmtree(job.path)


def _read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text("utf-8")) if file.exists() else []


def _lines(trials: list[dict[str, Any]]) -> str:
    """Return JSON with a line for each trial."""
    return "[\n" + ",\n".join(map(json.dumps, trials)) + "\n]\n"


def _without(spec: Spec, fields: Collection[str]) -> dict[str, Any]:
    """Return the fields of a spec except these and the seed."""
    table = flatten(json.loads(experiment_key(spec)))
    return {field: value for field, value in table.items() if field not in fields and field != "seed"}
