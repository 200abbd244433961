"""keel doctor, shell completion, and --debug."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.runs import findings, installation
from tests.conftest import Called

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_it_reports_the_machine_the_extras_and_the_data_sets(keel: Callable[..., Called]) -> None:
    called = keel("doctor", "--json")
    result = json.loads(called.out)
    assert (called.code, result["ok"]) == (0, True)
    checks = [finding["check"] for finding in result["findings"]]
    assert checks == ["packages", "processor", "disk", "memory", "gpu", "runs", "data", "charts"]
    assert {"name": "digits", "files": "embedded"} in result["data"]
    printed = keel("doctor")
    assert printed.code == 0
    for text in ("packages", "embedded", installation.EXTRAS["flower"], result["versions"]["torch"]):
        assert text in printed.out


def test_every_extra_has_a_purpose() -> None:
    assert set(installation.EXTRAS) == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


def test_a_missing_and_an_outdated_package_fail(keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["no-such-package>=1", "numpy>=99", "torch>=2", "absent; extra == 'ray'", "numpy; extra == 'ray'"]
    monkeypatch.setattr(installation, "requires", lambda name: requirements)
    called = keel("doctor", "--json")
    result = json.loads(called.out)
    assert (called.code, result["ok"]) == (1, False)
    text = result["findings"][0]["text"]
    assert "no-such-package is not installed; numpy " in text
    assert "is not >=99; run pip install keel-fl" in text
    problems = {extra["name"]: extra["problems"] for extra in result["extras"]}
    assert (problems["ray"], problems["flower"]) == (["absent is not installed"], [])


def test_little_disk_space_is_a_warning(keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "MIN_SPACE", 10**18)
    called = keel("doctor")
    assert called.code == 0
    assert "GB available; at least 1 GB is required" in called.out


def test_a_data_folder_that_is_a_file_fails(
    keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "file" / "data"))
    called = keel("doctor")
    assert called.code == 1
    assert f"{tmp_path / 'file'} is not a folder" in called.out


def test_it_answers_without_pytorch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['keel', 'doctor']; from keel.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "PyTorch" in ended.stdout
    assert "cannot be imported" in ended.stdout


@pytest.mark.parametrize(("words", "expected"), [("keel doc", "doctor"), ("keel report --cha", "--charts")])
def test_the_shell_completes_commands_and_options(
    words: str, expected: str, keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_KEEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert keel().out.split() == [expected]


def test_completion_can_be_installed(
    keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # tests may run outside any shell
    called = keel("--show-completion", "bash")
    assert "complete -o default -F _keel_completion keel" in called.out
    assert not (tmp_path / ".bashrc").exists()
    assert keel("--install-completion", "bash").code == 0
    assert "keel" in (tmp_path / ".bashrc").read_text()


def test_debug_shows_the_traceback_behind_an_error_of_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keel", "run", "--set", "local.lr=-1"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    debug = subprocess.run(
        [*command[:3], "--debug", *command[3:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    message = "keel: local.lr must be greater than 0 (got -1)\n"
    assert (plain.returncode, plain.stderr) == (2, message)
    assert debug.returncode == 2
    assert "Traceback (most recent call last)" in debug.stderr
    assert "KeelError" in debug.stderr
    assert debug.stderr.endswith(message)
