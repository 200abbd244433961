"""The command `keel`. A command imports what is slow to import only when it runs, so that --help answers quickly."""

import sys
from typing import Annotated

import typer

from keel.cli import data, deploy, paper
from keel.cli.algorithms import algorithms
from keel.cli.campaign import campaign
from keel.cli.compare import compare, demo, report
from keel.cli.export import export
from keel.cli.run import resume, run
from keel.cli.sweep import sweep
from keel.cli.typer_adapter import USAGE_ERROR, disable_rich_help, usage_message
from keel.errors import Interrupted, KeelError

disable_rich_help()

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


for command in (demo, run, resume, compare, sweep, report, export, campaign, algorithms):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """Run the command. A user's mistake is printed as one line on standard error, with exit code 2."""
    try:
        status = app(standalone_mode=False)
    except (KeelError, USAGE_ERROR) as error:
        message = usage_message(error) or str(error)
        typer.echo(f"keel: {' '.join(message.split())}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder without write permission, a closed pipe
        typer.echo(f"keel: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("keel: interrupted; continue from the last checkpoint with keel resume", err=True)
        sys.exit(130)
    except Interrupted:
        typer.echo("keel: interrupted; run the same command again to continue", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
