from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import KeelError
from keel.data.store import data_folder, prepared


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    (tmp_path / "source").write_text("1")
    return tmp_path


def load(folder: Path, calls: list[Path], **settings: Any) -> Any:
    def make(target: Path) -> dict[str, Any]:
        calls.append(target)
        np.save(target / "numbers.npy", np.arange(5, dtype=np.uint8))
        return {"names": ["a"]}

    return prepared("small", [folder / "source"], settings, make)


def test_arrays_are_prepared_once_and_memory_mapped(folder: Path) -> None:
    calls: list[Path] = []
    first, second = load(folder, calls), load(folder, calls)
    assert len(calls) == 1
    assert first.sha256 == second.sha256
    assert first.facts == {"names": ["a"]}
    assert isinstance(second.arrays["numbers"], np.memmap)
    assert second.arrays["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_arrays_are_prepared_again_if_a_source_or_a_setting_changes(folder: Path) -> None:
    calls: list[Path] = []
    load(folder, calls)
    load(folder, calls, length=3)
    (folder / "source").write_text("another")
    load(folder, calls)
    assert len(calls) == 3


def test_an_interrupted_preparation_leaves_no_files(folder: Path) -> None:
    def fail(target: Path) -> dict[str, Any]:
        np.save(target / "numbers.npy", np.arange(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared("small", [folder / "source"], {}, fail)
    assert [p.name for p in (folder / "prepared").iterdir() if not p.name.endswith(".lock")] == []


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY tampered"], ids=["truncated", "changed"])
def test_a_damaged_array_is_refused(folder: Path, damage: bytes) -> None:
    load(folder, [])
    (file,) = (folder / "prepared").glob("*/numbers.npy")
    file.write_bytes(damage)
    with pytest.raises(KeelError, match=r"numbers\.npy' is damaged; delete '.*' to have it prepared again"):
        load(folder, [])


def test_the_data_folder_is_keel_data_or_in_the_users_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folder() == folder
    monkeypatch.delenv("KEEL_DATA")
    assert data_folder().name == "keel"
