"""Ctrl-C before the command has begun its work."""

from pathlib import Path

import pytest

from tests.cli.calling import call_keel


def test_a_signal_while_the_command_is_put_together_ends_it_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keel.cli.app", interrupted)
    called = call_keel(tmp_path, "repair", "run")
    assert called.err == "keel: interrupted; run the same command again to continue\n"
    assert called.code == 130
