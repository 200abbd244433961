"""What a site keeps to itself in the folder of its client state: the key of its fingerprint, and a count of reports."""

import hmac
import os
import secrets
from pathlib import Path

from filelock import FileLock

from keel.core.examples import FederatedData
from keel.deploy.site_data import has_test_examples
from keel.deploy.site_errors import PolicyRefusal
from keel.runs.files import write_atomic

KEY_FILE, COUNT_FILE = "fingerprint.key", "reports"
KEY_BYTES = 32


def data_fingerprint(data: FederatedData, state: Path) -> str:
    """Return the HMAC-SHA256 of a site's examples. The key stays at the site, so that nobody else can test guesses."""
    parts = [data.train.fingerprint(), data.test.fingerprint() if has_test_examples(data) else ""]
    return hmac.new(_key(state), " ".join(parts).encode(), "sha256").hexdigest()


def _key(state: Path) -> bytes:
    file = state / KEY_FILE
    with _locked(state):
        if not file.exists():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(secrets.token_bytes(KEY_BYTES))
        key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{file} must have {KEY_BYTES} bytes (got {len(key)})")
    return key


def count_report(state: Path, max_reports: int) -> None:
    """Count a report before it leaves.

    Raises:
        PolicyRefusal: As many reports as the policy allows have left already.
    """
    file = state / COUNT_FILE
    with _locked(state):
        count = int(file.read_text()) if file.exists() else 0
        if count >= max_reports:
            raise PolicyRefusal("max_reports", f"{count} reports have left the site")
        write_atomic(file, [str(count + 1).encode()])


def _locked(state: Path) -> FileLock:
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return FileLock(state / ".secrets.lock", mode=0o600)
