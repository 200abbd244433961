"""Charts are drawn in a process of their own, without which a page has tables alone."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keel.report import page
from keel.report.drawing import CannotDraw, browser_script, draw
from tests.conftest import Called
from tests.report.test_comparison import algorithm, write_run

GIGABYTE = 2**30


@pytest.fixture
def short_address_space() -> Iterator[None]:
    """Leave this process and those that it starts 8 GB more than it has: V8 reserves more than that."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 8 * GIGABYTE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (before, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@pytest.mark.usefixtures("short_address_space")
def test_a_page_without_address_space_for_charts_has_the_tables(
    tmp_path: Path, keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", [0.1, 0.2, 0.3], 10, 0.3, **algorithm("fedavg"))
    monkeypatch.setattr(page, "browser_script", browser_script.__wrapped__)  # another test may have made it already
    problem = "charts cannot be drawn: the process that draws them was ended by SIG"
    called = keel("report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html"))
    assert (called.code, called.err.count("\n")) == (0, 1)
    assert called.err.startswith(problem)
    assert "30.0 %" in called.out
    text = (tmp_path / "report.html").read_text()
    assert f"This page has no charts: {problem}" in text
    assert "30.0\u00a0%" in text
    called = keel("report", str(tmp_path / "run"), "--charts", str(tmp_path / "charts"))
    assert called.code == 2  # what was asked for is missing
    assert called.err.splitlines()[-1].startswith(f"keel: {problem}")
    assert "30.0 %" in called.out


def test_a_chart_that_is_not_valid_is_reported() -> None:
    with pytest.raises(CannotDraw, match="charts cannot be drawn: ValueError: Vega-Lite to SVG"):
        draw([({"mark": "sphere"}, "svg")])


def test_the_command_works_without_docstrings(tmp_path: Path) -> None:
    """Under python -OO there are no docstrings, which Altair requires and Typer shows."""
    program = (
        "import sys; from keel.cli import main; import keel.report.altair_adapter\n"
        f"sys.argv = ['keel', 'run', '--rounds', '1', '--quiet', '--out', {str(tmp_path / 'run')!r}]\n"
        "main()"
    )
    for arguments, printed in (["-m", "keel", "--help"], "report"), (["-c", program], "finished after 1 round"):
        ended = subprocess.run([sys.executable, "-OO", *arguments], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert printed in ended.stdout
