"""The commands on the page that repeat the runs."""

import shlex

from keel.config.defaults import assignments, user_files
from keel.config.schema import CUSTOM
from keel.runs.folder import RunFolder


def rerun_command(folder: RunFolder) -> tuple[list[str], str]:
    """Return the words of the command that repeats a run from any folder, and what the command requires.

    The command is empty if parts of the run were passed as Python objects.
    """
    table = folder.table
    named = {part: table[part]["name"] for part in ("algorithm", "data", "model", "engine")}
    named["sampler"] = table["participation"]["sampler"]
    objects = [part for part, reference in named.items() if reference == CUSTOM]
    objects += ["loss"] if folder.environment["loss"] == CUSTOM else []
    if objects:
        return [], f"only from Python: pass the same {', '.join(objects)} to keel.run"
    files = user_files(table)
    requirements = [f"the files {', '.join(files)}"] if files else []
    modules = dict.fromkeys(reference.partition(":")[0] for reference in named.values() if ":" in reference)
    requirements += [f"the module {module} on the import path" for module in modules]
    options = ["--algorithm", named["algorithm"], "--seed", str(table["seed"])]
    for assignment in assignments(table):
        if assignment.partition("=")[0] not in ("algorithm.name", "seed"):
            options += ["--set", assignment]
    words = [shlex.quote(word) for word in ("keel", "run", *options)]
    return words, f"requires {' and '.join(requirements)}" if requirements else ""
