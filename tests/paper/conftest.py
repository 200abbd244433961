"""Fixtures for the tests of keel.paper."""

from collections.abc import Iterator
from typing import Any

import pytest

from keel.runs.parallel import Job
from tests.conftest import run_in_process


@pytest.fixture(scope="module", autouse=True)
def run_jobs_in_this_process() -> Iterator[None]:
    """Replace the worker processes: starting them takes longer than these short runs, and tests/runs covers them."""

    def run_all(jobs: list[Job], *_: Any) -> list[dict[str, Any]]:
        return [run_in_process(job.spec, job.path) for job in jobs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keel.runs.compare.run_all", run_all)
        patch.setattr("keel.runs.sweep.run_all", run_all)
        yield
