"""Fixtures of the deployment tests. The test modules skip themselves when Flower is not installed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.deploy.in_process import InProcessFederation


@pytest.fixture
def federation(tmp_path: Path) -> "InProcessFederation":
    from tests.deploy.in_process import InProcessFederation

    return InProcessFederation(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def complete_descriptions() -> Iterator[None]:
    try:
        from keel.deploy.site import Site
    except ImportError:  # without Flower every module of this folder is skipped
        yield
        return
    from tests.deploy.described import describe, plain_describe

    Site.describe = describe  # type: ignore[method-assign]
    yield
    Site.describe = plain_describe  # type: ignore[method-assign]
