"""The fixture of the tests of a federation; without Flower each module is skipped before it is asked for."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.deploy.in_one_process import InOneProcess


@pytest.fixture
def federation(tmp_path: Path) -> "InOneProcess":
    from tests.deploy.in_one_process import InOneProcess

    return InOneProcess(tmp_path)
