"""Writes the folder of a new federation from the template: a Flower app, its scripts and a README."""

import re
from importlib.resources import as_file, files
from pathlib import Path
from shutil import rmtree

from keel.algorithms import algorithm_class
from keel.errors import KeelError

NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
"""What Flower takes as the name of an app."""
PLACES = {"app": "@package@", "flwr": ".flwr", "gitignore.in": ".gitignore.in"}
"""Names of the template that are others in the folder. All its files end in .in: they are no code of Keel's."""


def new_federation(folder: Path, sites: int, algorithm: str) -> list[Path]:
    """The files of a new federation, in a folder that is not there yet."""
    name = folder.name.lower().replace("_", "-")
    if not NAME.fullmatch(name):
        raise KeelError(f"folder: {folder.name!r}; accepted: up to 32 letters, digits and hyphens, as in my-federation")
    if folder.exists():
        raise KeelError(f"folder: {str(folder)!r} exists; accepted: a new one")
    if algorithm_class(algorithm).pooled:
        raise KeelError(f"algorithm: {algorithm!r} is no federation's; accepted: another of keel algorithms")
    values = {"name": name, "package": name.replace("-", "_"), "sites": str(sites), "algorithm": algorithm}
    values["folder"] = str(folder.absolute())
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with as_file(files("keel.deploy").joinpath("template")) as template:
            sources = sorted(template.rglob("*.in"))
            return [_fill(source, template, folder, values) for source in sources]
    except BaseException:  # also Ctrl-C: nothing half-made stays
        rmtree(folder, ignore_errors=True)
        raise


def _fill(source: Path, template: Path, folder: Path, values: dict[str, str]) -> Path:
    parts = [PLACES.get(part, part) for part in source.relative_to(template).parts]
    target = folder / _filled("/".join(parts).removesuffix(".in"), values)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_filled(source.read_text(encoding="utf-8"), values), encoding="utf-8")
    if target.suffix == ".sh":
        target.chmod(0o755)
    return target


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)
