"""Parts of typer that are private or differ between versions. tests/cli/test_typer_adapter.py checks each of them."""

from typing import Any

import typer
import typer.core

from keel.errors import Interrupted

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""The base class of the errors that typer raises for wrong options. It has no public name in every version."""


class Commands(typer.core.TyperGroup):
    """The commands. Typer would turn a KeyboardInterrupt into an exit code without a line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(*error.args) from None


def disable_rich_help() -> None:
    """Make help plain text: with Rich, some versions escape the brackets in it even where its markup is off."""
    typer.core.HAS_RICH = False


def usage_message(error: Exception) -> str | None:
    """Return what is wrong with the options, or None if the error is not about them."""
    if not isinstance(error, USAGE_ERROR):
        return None
    if "Did you mean" in error.message:  # typer's suggestion of a command; some versions of click would add it again
        return str(error.message)
    return str(error.format_message())
