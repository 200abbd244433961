"""The versions of the software that a run's result depends on."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import torch


def source_sha256() -> str:
    """Return the SHA-256 of all source files of Keel."""
    package = Path(__file__).parents[1]
    return sha256(b"".join(file.read_bytes() for file in sorted(package.rglob("*.py")))).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines of a run for bit-identical results."""
    return {"source_sha256": source_sha256(), "torch": torch.__version__, "numpy": np.__version__}
