"""What Keel uses of typer beyond its documented interface. A failure here names what a new version of typer broke."""

from typing import Annotated

import pytest
import typer
import typer.core

from keel.cli.typer_adapter import USAGE_ERROR, disable_rich_help, usage_message


def app() -> typer.Typer:
    small = typer.Typer(add_completion=False, rich_markup_mode=None)

    @small.command()
    def count(number: Annotated[int, typer.Option(help="A number [of things].")] = 0) -> None: ...

    return small


def test_typer_still_has_the_switch_for_rich_help() -> None:
    assert hasattr(typer.core, "HAS_RICH"), "typer.core.HAS_RICH is gone: disable_rich_help() has no effect"
    disable_rich_help()
    assert typer.core.HAS_RICH is False


@pytest.mark.parametrize("arguments", [["--number", "x"], ["--nonsense"], ["surplus"]])
def test_every_wrong_option_raises_the_usage_error(arguments: list[str]) -> None:
    with pytest.raises(USAGE_ERROR) as raised:
        app()(arguments, standalone_mode=False)
    assert arguments[-1].lstrip("-") in (usage_message(raised.value) or "")


def test_the_usage_error_is_no_broader_than_wrong_options() -> None:
    assert USAGE_ERROR.__name__ == "UsageError", "the base class of typer.BadParameter is another one now"
    assert not issubclass(ValueError, USAGE_ERROR)
    assert usage_message(ValueError("x")) is None
