"""`keel deploy clean`: old client state is removed, and nothing else."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from tests.conftest import Called
from tests.deploy.policies import write_policy

Keel = Callable[..., Called]

OLD, NEW = "0" * 32, "1" * 32


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The client state of two sites, each with a training of 40 days ago and one of today."""
    for site in 0, 1:
        for training, days in (OLD, 40), (NEW, 0):
            folder = tmp_path / "client-state" / f"site-{site}" / training
            folder.mkdir(parents=True)
            (folder / "state-1.safetensors").write_bytes(b"state")
            for path in folder / "state-1.safetensors", folder:
                os.utime(path, (time.time() - days * 86400,) * 2)
        (folder.parent / "audit.jsonl").write_text("")
        (folder.parent / "fingerprint.key").write_bytes(b"key")
    return tmp_path / "client-state"


def names(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "site-0").iterdir())


def test_state_that_is_older_than_the_retention_of_the_policy_is_removed(
    keel: Keel, state: Path, tmp_path: Path
) -> None:
    write_policy(tmp_path, retention_days=41)
    assert keel("deploy", "clean").out == "removed 0 trainings\n"
    write_policy(tmp_path, retention_days=39)
    dry = keel("deploy", "clean", "--dry-run")
    assert dry.out.count(f"/{OLD}") == 2
    assert names(state) == [OLD, NEW, "audit.jsonl", "fingerprint.key"]
    assert "removed 2 trainings" in keel("deploy", "clean").out
    assert names(state) == [NEW, "audit.jsonl", "fingerprint.key"]


def test_days_and_the_folder_of_one_site_can_be_given(keel: Keel, state: Path) -> None:
    assert "removed 1 trainings" in keel("deploy", "clean", str(state / "site-0"), "--days", "30").out
    assert names(state) == [NEW, "audit.jsonl", "fingerprint.key"]
    assert (state / "site-1" / OLD).exists()


def test_a_missing_folder_or_policy_is_an_error_of_one_line(keel: Keel) -> None:
    assert "site.toml" in keel("deploy", "clean").err
    called = keel("deploy", "clean", "nowhere", "--days", "3")
    assert (called.code, called.err.count("\n")) == (2, 1)
