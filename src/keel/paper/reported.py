"""Stored results of earlier campaigns, whose runs are not made again."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.config.schema import Spec
from keel.paper.probe import is_older
from keel.paper.results import fields_of, seed_values
from keel.paper.run_index import spec_fields
from keel.paper.trials import SEARCHES


class Reported:
    """The runs in a folder of result files, without those of code that computed something else."""

    def __init__(self, folder: Path):
        results = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
        self.searches = folder / SEARCHES
        self.seeds: dict[str, set[int]] = {}
        for part in (part for result in results for part in result.get("parts", [])):
            for row in part["rows"]:
                fields = fields_of(part, row)
                if row["runs"] and not is_older(row.get("probe"), fields):
                    self.seeds.setdefault(_key(fields), set()).update(seed_values(row))

    def has(self, spec: Spec) -> bool:
        """Return whether the results contain the run of this spec."""
        return spec.seed in self.seeds.get(_key(spec_fields(spec)), ())


def default_of(name: str) -> Any:
    """Return the default of a field, which results have that were stored before the field existed."""
    table, _, field = name.partition(".")
    fields = getattr(Spec.model_fields[table].annotation, "model_fields", {}) if table in Spec.model_fields else {}
    return fields[field].default if field in fields else None


def copy_searches(source: Path, target: Path) -> None:
    """Copy the scores of searches that have more trials than those in `target`."""
    for file in (source / SEARCHES).glob("*.json"):
        other = target / SEARCHES / file.name
        if not other.exists() or other.stat().st_size < file.stat().st_size:
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, other)


def _key(fields: Mapping[str, Any]) -> str:
    differing = {name: value for name, value in fields.items() if value != default_of(name)}
    return json.dumps(differing, sort_keys=True)
