"""Fixtures of the deployment tests. The test modules skip themselves when Flower is not installed."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.deploy.in_process import InProcessFederation


@pytest.fixture
def federation(tmp_path: Path) -> "InProcessFederation":
    from tests.deploy.in_process import InProcessFederation

    return InProcessFederation(tmp_path)
