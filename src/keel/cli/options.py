"""Options that commands share, and how they become a spec or JSON."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer


class Format(StrEnum):
    """Formats of a printed table."""

    text = "text"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the spec, as in local.lr=0.1; repeatable."),
]
Algorithm = Annotated[str | None, typer.Option(help="algorithm.name, see keel algorithms, or module:name.")]
Data = Annotated[str | None, typer.Option(help="data.name, see keel data list, or module:name.")]
Model = Annotated[str | None, typer.Option(help="model.name, as in mlp or lenet, or module:name.")]
Clients = Annotated[int | None, typer.Option(help="data.clients: number of clients.")]
Alpha = Annotated[
    float | None,
    typer.Option(
        help="data.alpha: with dirichlet, the total concentration of a client's label distribution, and 0 gives each "
        "client one class; with dirichlet_per_class, the concentration of most other code. With 10 classes, 1 in "
        "dirichlet is about as heterogeneous as 0.1 in dirichlet_per_class."
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(
        help="data.partition: dirichlet (a label distribution per client), dirichlet_per_class (a distribution over "
        "the clients per class), classes, shards, quantity, feature, iid or key."
    ),
]
Lr = Annotated[float | None, typer.Option(help="local.lr: local learning rate.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Rate = Annotated[float | None, typer.Option(help="participation.rate: share of the clients in a round.")]
Target = Annotated[
    str | None,
    typer.Option(
        help="Target of the primary metric: a number, as in 0.8, or the algorithm whose final value is the target "
        "(default: fedavg)."
    ),
]
Interval = Annotated[
    bool,
    typer.Option(
        "--interval",
        help="Print 95 % confidence intervals instead of standard deviations, and differences from the baseline.",
    ),
]
Cost = Annotated[bool, typer.Option("--cost", help="Also print the cost of reaching the target.")]
Engine = Annotated[str | None, typer.Option(help="engine.name: auto, serial, cohort, pool, ray or module:name.")]
Address = Annotated[
    str | None,
    typer.Option(help="engine.address: a Ray cluster, as auto or HOST:PORT; local starts one on this machine."),
]
Form = Annotated[Format | None, typer.Option("--format", help="Format of the printed table (default: text).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resource estimate and run nothing.")]


def with_options(table: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Put the options that are not None into the spec."""
    for key, value in options.items():
        if isinstance(value, dict):
            present = {field: v for field, v in value.items() if v is not None}
            if present:
                below = table.get(key, {})
                table[key] = {**below, **present} if isinstance(below, dict) else below
        elif value is not None:
            table[key] = value
    return table


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
