"""The help of every command, from the code."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from keel.cli import app


def markdown() -> str:
    """Return a section for each command."""
    return "\n".join(_sections(typer.main.get_command(app), "keel", None))


def _sections(command: Any, path: str, parent: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    text = re.sub(r"[ \t]+$", "", command.get_help(context), flags=re.MULTILINE)
    yield f"{'#' * (1 + len(path.split()))} `{path}`\n\n```text\n{text.strip()}\n```\n"
    for name, child in getattr(command, "commands", {}).items():
        yield from _sections(child, f"{path} {name}", context)
