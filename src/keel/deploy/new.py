"""`keel deploy new`: write the folder of a new federation from the template."""

import re
from datetime import UTC, datetime, timedelta
from importlib.resources import as_file, files
from pathlib import Path
from shutil import rmtree

from keel.algorithms import algorithm_class
from keel.config.defaults import make_spec
from keel.config.schema import CUSTOM
from keel.deploy.proxy import proxy_values, substitute
from keel.errors import KeelError

NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
"""Names that Flower accepts for an app."""
POLICY_LIFETIME = timedelta(days=365)
"""Time until the policy of a new federation expires."""
TARGET_NAMES = {"app": "@package@", "flwr": ".flwr", "gitignore.in": ".gitignore.in"}
"""Parts of the template's paths that have another name in the folder. Every file of the template ends in .in, so that
no tool takes it for code of Keel."""


def new_federation(folder: Path, sites: int, algorithm: str) -> list[Path]:
    """Write the files of a new federation into a new folder, and return their paths."""
    name = folder.name.lower().replace("_", "-")
    if not NAME.fullmatch(name):
        raise KeelError(
            f"the folder's name must have up to 32 letters, digits and hyphens, as my-federation (got {folder.name!r})"
        )
    if folder.exists():
        raise KeelError(f"folder {str(folder)!r} exists; choose a new one")
    if algorithm_class(algorithm).pooled:
        raise KeelError(f"algorithm must be a federated one, see keel algorithms (got {algorithm!r})")
    values = {"name": name, "package": name.replace("-", "_"), "sites": str(sites), "algorithm": algorithm}
    values["expires"] = str(datetime.now(UTC).date() + POLICY_LIFETIME)
    values.update(proxy_values())
    values["folder"] = str(folder.absolute())
    values["lr"] = str(make_spec({"algorithm": {"name": algorithm}, "data": {"name": CUSTOM}}).local.lr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with as_file(files("keel.deploy").joinpath("template")) as template:
            return [_write(source, template, folder, values) for source in sorted(template.rglob("*.in"))]
    except BaseException:  # also Ctrl-C: remove an incomplete folder
        rmtree(folder, ignore_errors=True)
        raise


def _write(source: Path, template: Path, folder: Path, values: dict[str, str]) -> Path:
    parts = [TARGET_NAMES.get(part, part) for part in source.relative_to(template).parts]
    target = folder / substitute("/".join(parts).removesuffix(".in"), values)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(substitute(source.read_text(encoding="utf-8"), values), encoding="utf-8")
    if target.suffix == ".sh":
        target.chmod(0o755)
    return target
