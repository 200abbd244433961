"""Nothing that comes from outside is unpickled, and every download has a checksum."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from faults._audit import watched
from faults._data_folder import data_folder
from faults._reader_files import READERS
from faults.messages import SIDES
from keel.data.catalog import CATALOG


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_its_file_without_unpickling(name: str, tmp_path: Path) -> None:
    for file, content in READERS[name].files().items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    with watched(tmp_path) as violations, data_folder(tmp_path), without_pickle():
        READERS[name].read(tmp_path)
    assert violations == []


@contextmanager
def without_pickle() -> Iterator[None]:
    """Let every call of pickle's load functions fail, also for objects of no class, which raise no audit event."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a reader unpickles")

    with patch("pickle.load", fail), patch("pickle.loads", fail):
        yield


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.__name__)
def test_a_message_is_handled_without_unpickling(side: Any, tmp_path: Path) -> None:
    side(tmp_path, Random(0), lambda content: content)  # builds what is cached
    with watched(tmp_path) as violations, without_pickle():
        assert side(tmp_path, Random(0), lambda content: content) is None
    assert violations == []


def test_unpickling_is_noticed(tmp_path: Path) -> None:
    stored = np.array([Path("x")], dtype=object)
    np.save(tmp_path / "a.npy", stored, allow_pickle=True)
    torch.save(Path("x"), tmp_path / "a.pt")
    for load in (
        lambda: pickle.loads(pickle.dumps(Path("x"))),  # noqa: S301
        lambda: np.load(tmp_path / "a.npy", allow_pickle=True),
        lambda: torch.load(tmp_path / "a.pt", weights_only=False),
    ):
        with watched(tmp_path) as violations:
            load()
        assert any(violation.startswith("unpickled pathlib.") for violation in violations)


def test_every_download_is_encrypted_and_has_a_checksum() -> None:
    downloads = [download for entry in CATALOG.values() for download in entry.downloads]
    assert downloads
    for download in downloads:
        method, digest = download.digest.split(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[method]
        assert download.url.startswith("https://")
        assert not Path(download.path).is_absolute()
        assert ".." not in Path(download.path).parts
