"""Print the lowest version of each dependency that pyproject.toml allows, as constraints for pip.

PyTorch stays at the version in constraints.txt.
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("vision", "text", "table", "sweep", "frame")
"""Those whose packages `make test-lowest` installs."""
CLICK = "click<8.5"
"""Typer 0.20 calls functions that later versions of click have deprecated."""


def lowest_versions(project: dict) -> list[str]:
    """Return NAME==VERSION for each requirement with a lower bound."""
    extras = [project["optional-dependencies"][name] for name in EXTRAS]
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    bounds = [re.match(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in requirements]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] != "torch"]


if __name__ == "__main__":
    print("\n".join([*lowest_versions(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]), CLICK]))
