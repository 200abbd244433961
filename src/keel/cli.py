"""The command. Imports what is heavy only when a command needs it, so that --help answers at once."""

import sys
from typing import Annotated, Any

import typer
import typer.core

from keel.commands import data, deploy, paper
from keel.commands.algorithms import algorithms
from keel.commands.compare import compare, demo, report
from keel.commands.run import resume, run
from keel.commands.sweep import sweep
from keel.errors import KeelError, Stopped

typer.core.HAS_RICH = False  # help is plain; some versions would still escape its brackets for Rich

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def keel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning that does not drift."""
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("keel-fl"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""What typer raises for a wrong option; it has no public name in every version that Keel lives with."""


for command in (demo, run, resume, compare, sweep, report, algorithms):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """The entry point: a mistake of the user's is one line and exit code 2, whatever found it."""
    try:
        status = app(standalone_mode=False)
    except (KeelError, USAGE_ERROR) as error:
        message = error.format_message() if isinstance(error, USAGE_ERROR) else str(error)
        typer.echo(f"keel: {' '.join(message.split())}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that cannot be written, a pipe that was closed
        typer.echo(f"keel: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("keel: stopped at once; what was saved before can be gone on with (keel resume)", err=True)
        sys.exit(130)
    except Stopped:
        typer.echo("keel: stopped; the same command goes on where it was", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
