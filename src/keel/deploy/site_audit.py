"""The audit log of a site: one line for each request that it has answered or refused."""

from pathlib import Path
from typing import Any

from keel.deploy.audit import AuditLog
from keel.deploy.flower_adapter import log

AUDIT_FILE = "audit.jsonl"


def record(state: Path, event: str, **fields: Any) -> None:
    """Append a line to the audit log in the folder of the site's client state."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    AuditLog(state / AUDIT_FILE).append(event, **fields)


def record_refusal(state: Path, **fields: Any) -> None:
    """Append a line for a request that the site refuses. If that fails, the request is refused all the same."""
    try:
        record(state, "refused", **fields)
    except Exception:  # such as a full disk
        log.exception("this site could not write its audit log")
