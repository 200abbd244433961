"""The audit log of a site: one line for each request that it has answered or refused."""

import json
from pathlib import Path
from typing import Any

from keel.deploy.audit import AuditLog
from keel.deploy.flower_adapter import log

AUDIT_FILE = "audit.jsonl"


def record(state: Path, event: str, **fields: Any) -> None:
    """Append a line to the audit log in the folder of the site's client state."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    AuditLog(state / AUDIT_FILE).append(event, **fields)


def is_recorded(state: Path, settings: str) -> bool:
    """Return whether a line of the audit log has the settings with this hash."""
    try:
        with (state / AUDIT_FILE).open("rb") as lines:
            return any(_has_settings(line, settings) for line in lines)
    except OSError:  # there is none yet, or it cannot be read, which the next line that is written reports
        return False


def _has_settings(line: bytes, settings: str) -> bool:
    """Return whether a line has these settings, and not their hash alone in a field that the server chooses."""
    if settings.encode() not in line:
        return False
    try:
        fields = json.loads(line)
    except ValueError:  # `keel deploy audit verify` reports it
        return False
    return isinstance(fields, dict) and fields.get("settings") == settings and "spec" in fields


def record_refusal(state: Path, **fields: Any) -> None:
    """Append a line for a request that the site refuses. If that fails, the request is refused all the same."""
    try:
        record(state, "refused", **fields)
    except Exception:  # such as a full disk
        log.exception("this site could not write its audit log")
