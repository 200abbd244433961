"""The commands on the page that repeat the runs."""

import shlex

from keel.config.defaults import assignments, user_files
from keel.config.schema import CUSTOM, not_computed
from keel.report.loaded_run import LoadedRun, Table


class RerunCommands:
    """Commands that repeat runs from any folder.

    Finding the fields that are not defaults takes most of the time of a page. They are looked for once for the runs
    that differ only in the seed, and starting from those of a run that names the same algorithm, data set and model.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}
        self._near: dict[tuple[str, ...], tuple[Table, list[str]]] = {}

    def of(self, run: LoadedRun) -> tuple[list[str], str]:
        """Return the words of the command, and what the command requires.

        The command is empty if parts of the run were passed as Python objects.
        """
        table = run.table
        named: dict[str, str] = {part: table[part]["name"] for part in ("algorithm", "data", "model", "engine")}
        named["sampler"] = table["participation"]["sampler"]
        objects = [part for part, reference in named.items() if reference == CUSTOM]
        objects += ["loss"] if run.environment["loss"] == CUSTOM else []
        if objects:
            return [], f"only from Python: pass the same {', '.join(objects)} to keel.run"
        files = user_files(table)
        requirements = [f"the files {', '.join(files)}"] if files else []
        modules = dict.fromkeys(reference.partition(":")[0] for reference in named.values() if ":" in reference)
        requirements += [f"the module {module} on the import path" for module in modules]
        options = ["--algorithm", named["algorithm"], "--seed", str(table["seed"])]
        for assignment in self._assignments(table, tuple(named.values())):
            options += ["--set", assignment]
        words = [shlex.quote(word) for word in ("keel", "run", *options)]
        return words, f"requires {' and '.join(requirements)}" if requirements else ""

    def _assignments(self, table: Table, names: tuple[str, ...]) -> list[str]:
        """Return the fields that are not defaults, but for the algorithm's name and the seed, which are options."""
        table = {section: value for section, value in table.items() if section not in not_computed(table)}
        key = repr({**table, "seed": None})
        if key not in self._found:
            found = assignments(table, self._near.get(names))
            self._near.setdefault(names, (table, [assignment.partition("=")[0] for assignment in found]))
            self._found[key] = [a for a in found if a.partition("=")[0] not in ("algorithm.name", "seed")]
        return self._found[key]
