"""What commands share: options, and how they become a table or JSON."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer


class Format(StrEnum):
    """The forms of a table."""

    text = "text"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Target = Annotated[
    str | None,
    typer.Option(help="What is to be reached: a number, or the algorithm whose final accuracy it is (else FedAvg's)."),
]
Interval = Annotated[bool, typer.Option("--interval", help="95 % confidence intervals instead of deviations.")]
Cost = Annotated[bool, typer.Option("--cost", help="Also the cost to reach the target, by the paper's procedure.")]
Engine = Annotated[str | None, typer.Option(help="engine.name: auto, serial, cohort, pool or ray.")]
Address = Annotated[
    str | None, typer.Option(help="engine.address: a Ray cluster, as auto or HOST:PORT; local starts one here.")
]
Form = Annotated[Format | None, typer.Option("--format", help="How the table is printed; else as text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and run nothing.")]


def with_options(table: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, put over the table."""
    for key, value in options.items():
        if isinstance(value, dict):
            given = {field: v for field, v in value.items() if v is not None}
            if given:
                below = table.get(key, {})
                table[key] = {**below, **given} if isinstance(below, dict) else below
        elif value is not None:
            table[key] = value
    return table


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
