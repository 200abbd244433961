"""Jobs of a Ray cluster as their worker runs them, without Ray."""

from concurrent.futures import Future
from pathlib import Path
from queue import Empty
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


def test_runs_that_have_lost_every_node_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(get=lambda value: value)
    monkeypatch.setattr(ray_jobs, "load_ray", lambda: ray)
    now = [0.0]
    monkeypatch.setattr(ray_jobs, "monotonic", lambda: now[0])
    slots = [1, 0]
    read = SimpleNamespace(read=SimpleNamespace(remote=list))
    receiver = ray_jobs.ProgressReceiver(read, lambda: slots.pop(0))
    with pytest.raises(Empty):
        receiver.get(timeout=0.0)
    now[0] = 601.0
    with pytest.raises(OSError, match=r"^Ray: no node has had room for a run for 600 s; the same command resumes .+$"):
        receiver.get(timeout=0.0)


def test_ctrl_c_waits_for_runs_only_while_a_node_is_alive() -> None:
    slots, waits = [2, 2, 0], []

    def wait(left: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        waits.append(left)
        return left[:1], left[1:]

    ray = SimpleNamespace(
        get=lambda value: value,
        wait=wait,
        remote=lambda **_: lambda function: function,
        exceptions=SimpleNamespace(RayError=ConnectionError),
    )
    cluster: Any = SimpleNamespace(ray=ray, gpus=0.0, slots_now=lambda: slots.pop(0))
    halted = SimpleNamespace(halt=SimpleNamespace(remote=lambda: None))
    executor = ray_jobs.RayExecutor(cluster, halted, Path("marker"), lambda *_: None)
    executor.refs = [1, 2, 3]
    executor.stop()
    assert waits == [[1, 2, 3], [2, 3]]
