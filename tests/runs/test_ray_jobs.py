"""Jobs of a Ray cluster as their worker runs them, without Ray."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.errors import Interrupted
from keel.runs import ray_jobs
from keel.runs.parallel import result_of


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file by which a job recognises its folder; Ray returns every value at once."""
    monkeypatch.setattr(ray_jobs, "load_ray", lambda: SimpleNamespace(get=lambda value: value))
    monkeypatch.setattr(ray_jobs, "tune", lambda: None)
    (file := tmp_path / "marker").touch()
    return file


def board(halted: bool) -> Any:
    return SimpleNamespace(is_halted=SimpleNamespace(remote=lambda: halted))


def test_a_job_initialises_its_process_and_returns_the_result(marker: Path) -> None:
    ends: list[Any] = []
    result = ray_jobs._in_job(board(False), marker, {}, lambda *senders: ends.extend(senders), lambda a: a + 1, 2)
    assert result == 3
    assert [type(end) for end in ends] == [ray_jobs.ProgressSender] * 2


def test_a_job_that_must_not_start_has_no_result(marker: Path) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it started")

    assert ray_jobs._in_job(board(True), marker, {}, fail, fail) is None


def test_an_interrupted_job_has_no_result(marker: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert ray_jobs._in_job(board(False), marker, {}, lambda *_: None, interrupted) is None


def test_a_job_without_a_result_was_interrupted() -> None:
    future: Future[dict[str, int] | None] = Future()
    future.set_result(None)
    with pytest.raises(Interrupted):
        result_of(future)
    ended: Future[dict[str, int] | None] = Future()
    ended.set_result({})
    assert result_of(ended) == {}
