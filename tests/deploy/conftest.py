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


@pytest.fixture(autouse=True)
def _data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what sites without `state-dir` write out of the user's data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))
