"""Policies of sites for tests."""

from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

PERMISSIVE: dict[str, Any] = {
    "study": "trial",
    "expires": date(9999, 1, 1),
    "algorithms": ["fedavg", "fedhbm"],
    "min_batch": 1,
    "min_steps": 1,
    "min_examples": 1,
    "max_rounds": 1000,
    "max_reports": 1000,
    "evaluation": True,
    "min_test_examples": 1,
    "timeout_seconds": 600,
    "max_memory_mb": 2**20,
    "max_reply_mb": 1024,
    "retention_days": 90,
}
"""A policy that allows the trainings of the tests."""


def policy_text(**fields: Any) -> str:
    """Return the permissive policy with other fields; a field that is None is left out."""
    return tomli_w.dumps({name: value for name, value in {**PERMISSIVE, **fields}.items() if value is not None})


def write_policy(folder: Path, **fields: Any) -> Path:
    file = folder / "site.toml"
    file.write_text(policy_text(**fields))
    return file
