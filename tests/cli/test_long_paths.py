"""A path that the file system cannot hold is an error of one line, and nothing is written."""

from pathlib import Path

import pytest

import keel
from tests.cli.calling import call_keel

NAME = "a" * 256
DEEP = "/".join(["b" * 200] * 25)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("long") / "run"
    keel.run({"rounds": 1, "engine": {"name": "serial"}}, out=out)
    return out


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("run", "--rounds", "1", "--out", NAME), "--out is too long (a name of 256 bytes, 256 in all)"),
        (("run", "--rounds", "1", f"--out={NAME}"), "--out is too long (a name of 256 bytes, 256 in all)"),
        (("run", "--rounds", "1", "--out", DEEP), "--out is too long (a name of 200 bytes, 5024 in all)"),
        (("resume", f"{NAME}=b"), "path is too long (a name of 258 bytes, 258 in all)"),
        (("demo", "--out", NAME), "--out is too long (a name of 256 bytes, 256 in all)"),
        (("report", "RUN", "-o", "ä" * 130), "-o is too long (a name of 260 bytes, 260 in all)"),
        (("report", "RUN", "--charts", NAME), "--charts is too long (a name of 256 bytes, 256 in all)"),
        (("resume", f"{NAME}/run"), "path is too long (a name of 256 bytes, 260 in all)"),
    ],
)
def test_a_path_that_is_too_long_is_named_with_its_length(
    command: tuple[str, ...], error: str, run: Path, tmp_path: Path
) -> None:
    called = call_keel(tmp_path, *(str(run) if word == "RUN" else word for word in command))
    assert called.code == 2
    assert called.err == f"keel: {error}; use at most 240 and 4000\n"
    assert list(tmp_path.iterdir()) == []


def test_a_path_of_the_environment_that_is_too_long_is_not_blamed_on_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / NAME))
    called = call_keel(tmp_path, "run", "--data", "mnist", "--rounds", "1", "--out", "out")
    assert called.code == 2
    assert called.err.startswith("keel: ")
    assert f"File name too long: '{tmp_path}/{NAME}" in called.err
    assert called.err.count("\n") == 1
