"""The command `keel doctor`: what this machine and this installation offer, and what is missing."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from keel.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from keel.runs.findings import Finding

TORCH = "PyTorch"
"""The check that only exists if it failed."""
VERSIONS = {"keel": "keel-fl", "torch": "torch", "numpy": "numpy"}


def doctor(as_json: AsJson = False) -> None:
    """Check this machine and what is installed. Exit code 1 if a check fails.

    Example: keel doctor
    """
    from keel.runs.installation import extras

    findings = list(_findings())
    usable = not any(finding.check == TORCH for finding in findings)
    data_sets = _data_sets() if usable else []  # their loaders import PyTorch
    failed = any(finding.status == "failed" for finding in findings)
    optional = extras()
    if as_json:
        print_json(
            {
                "ok": not failed,
                "versions": _versions(),
                "platform": platform.platform(),
                "findings": [vars(finding) for finding in findings],
                "extras": [{**vars(extra), "installed": extra.installed} for extra in optional],
                "data": data_sets,
            }
        )
        raise typer.Exit(1 if failed else 0)
    rows = [[finding.status, finding.check, finding.text] for finding in findings]
    typer.echo(", ".join(f"{name} {text}" for name, text in _versions().items()))
    typer.echo(platform.platform())
    _print_rows("", rows)
    rows = [[extra.name, "yes" if extra.installed else "no", extra.purpose] for extra in optional]
    _print_rows("Extras (pip install 'keel-fl[NAME]'):", rows)
    for extra in optional:
        outdated = [problem for problem in extra.problems if "is not installed" not in problem]
        if outdated:
            typer.echo(f"{extra.name}: {'; '.join(outdated)}")
    if data_sets:
        _print_rows("Data sets:", [[row["name"], row["files"]] for row in data_sets])
    raise typer.Exit(1 if failed else 0)


def _findings() -> "Iterator[Finding]":
    """Yield the checks. PyTorch may be what is missing: without it, the others are still made."""
    from keel.errors import one_line
    from keel.runs.findings import Finding, resource_findings
    from keel.runs.installation import folder_finding, package_findings

    yield from package_findings()
    try:
        import torch
    except (ImportError, OSError) as error:  # it is missing, or one of its libraries is
        yield Finding(TORCH, "failed", f"cannot be imported ({one_line(error)}); install it again")
        return
    from keel.core.devices import cores
    from keel.data.store import data_folder
    from keel.report.drawing import CannotDraw, browser_script

    yield Finding("processor", "ok", f"{cores()} cores, {torch.backends.cpu.get_cpu_capability()}")
    yield from resource_findings(Path())
    yield folder_finding(Path("runs").absolute(), "runs")
    yield folder_finding(data_folder(), "data")
    try:
        browser_script()
    except CannotDraw as error:
        yield Finding("charts", "warning", str(error))
    else:
        yield Finding("charts", "ok", "can be drawn")


def _versions() -> dict[str, str]:
    result = {"python": platform.python_version()}
    for name, distribution in VERSIONS.items():
        try:
            result[name] = version(distribution)
        except PackageNotFoundError:
            result[name] = "missing"
    return result


def _data_sets() -> list[dict[str, Any]]:
    """Return the data sets and where their files are."""
    from keel.data.catalog import CATALOG, describe

    return [{key: value for key, value in describe(name).items() if key in ("name", "files")} for name in CATALOG]


def _print_rows(title: str, rows: list[list[str]]) -> None:
    """Print a table without the console of the other commands, whose module imports PyTorch."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    typer.echo(f"\n{title}" if title else "")
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
