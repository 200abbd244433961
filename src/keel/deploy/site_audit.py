"""The audit log of a site: one line for each request that it has answered or refused."""

from pathlib import Path
from typing import Any

from keel.deploy.audit import AuditLog

AUDIT_FILE = "audit.jsonl"


def record(state: Path, event: str, **fields: Any) -> None:
    """Append a line to the audit log in the folder of the site's client state."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    AuditLog(state / AUDIT_FILE).append(event, **fields)
