"""The command `keel`. A command imports what is slow to import only when it runs, so that --help answers quickly."""

import logging
import os
import sys
from contextlib import suppress
from errno import ENAMETOOLONG
from io import TextIOWrapper
from typing import Annotated

import typer

from keel.cli import data, deploy, paper
from keel.cli.algorithms import algorithms
from keel.cli.campaign import campaign
from keel.cli.compare import compare, demo, report
from keel.cli.doctor import doctor
from keel.cli.export import export
from keel.cli.run import resume, run
from keel.cli.sweep import sweep
from keel.cli.typer_adapter import USAGE_ERROR, Commands, disable_rich_help, usage_message
from keel.cli.verify import repair, verify
from keel.errors import Interrupted, KeelError
from keel.signals import exit_code, is_ending, raising

log = logging.getLogger(__name__)

disable_rich_help()

NOTICE = "keel: stopping after the current round; press Ctrl-C again to stop immediately"
NAME_BYTES, PATH_BYTES = 240, 4000
"""Lengths of a name and of a path that file systems can hold, also with the suffixes that Keel adds."""

app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def keel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Also print debug messages, and the traceback of an error.")
    ] = False,
) -> None:
    """Federated learning that does not drift."""
    if debug:
        logging.basicConfig()
        logging.getLogger("keel").setLevel(logging.DEBUG)
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("keel-fl"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (demo, run, resume, compare, sweep, report, export, verify, repair, doctor, campaign, algorithms):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """Run the command. A user's mistake is printed as one line on standard error, with exit code 2.

    Ctrl-C, SIGTERM and SIGHUP end it in the same way: what it has finished is saved, its worker processes end, and one
    line says how to continue.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="backslashreplace")  # a path need not be valid Unicode
    with raising(NOTICE):
        sys.exit(_status())


def _status() -> int:
    """Run the command, and return its exit code."""
    try:
        status = app(prog_name="keel", standalone_mode=False)
    except (KeelError, USAGE_ERROR) as error:
        log.debug("the command failed", exc_info=error)
        message = usage_message(error) or str(error)
        typer.echo(f"keel: {' '.join(message.split())}", err=True)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:  # the latter while the command is put together
        return _interrupted(str(error) or str(Interrupted()))
    except typer.Abort:
        return _interrupted("nothing was changed")
    except OSError as error:  # a full disk, a folder without write permission, a closed pipe
        log.debug("the command failed", exc_info=error)
        if error.errno == ENAMETOOLONG:
            typer.echo(f"keel: {_too_long(error, sys.argv[1:])}", err=True)
            return 2
        with suppress(OSError):  # a terminal that was closed, which raised the error too
            typer.echo(f"keel: {error}", err=True)
        return exit_code() if is_ending() else 1
    return status if isinstance(status, int) else 0


def _too_long(error: OSError, arguments: list[str]) -> str:
    """The error for a path that the file system cannot hold: the first option with such a path, and its length."""
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", "")
        path = value if equals else argument
        longest, size = max(len(os.fsencode(part)) for part in path.split("/")), len(os.fsencode(path))
        if longest > NAME_BYTES or size > PATH_BYTES:
            option = name or (previous if previous.startswith("-") else "path")
            lengths = f"a name of {longest} bytes, {size} in all"
            return f"{option} is too long ({lengths}); use at most {NAME_BYTES} and {PATH_BYTES}"
    return str(error)  # the path is from an environment variable or a file


def _interrupted(advice: str) -> int:
    with suppress(OSError):  # a terminal that was closed
        typer.echo(f"keel: interrupted; {advice}", err=True)
    return exit_code()
