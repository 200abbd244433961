"""`keel deploy status`: how a training is, from its run folder alone."""

import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from keel.core.records import COMPLETE
from keel.deploy.watch import MEANINGS
from keel.runs.folder import RunFolder


def training_status(path: Path) -> dict[str, Any]:
    """Return the state of a training: `ok`, `lines` to print, the rounds, idle sites and outliers."""
    folder = RunFolder.open(path)
    summary, rounds = folder.summary, folder.spec.rounds
    done, running = len(folder.records()), _is_locked(folder)
    idle: dict[str, str] = {} if summary is None else summary.get("idle_sites", {})
    far = {} if summary is None else summary.get("outliers", {})
    lines = []
    if summary is not None:
        lines.append(f"{summary['status']} after {done} of {rounds} rounds: {path}")
    elif running:
        lines.append(f"running: {done} of {rounds} rounds: {path}")
    else:
        lines.append(f"not finished: {done} of {rounds} rounds; the same flwr run resumes: {path}")
        lines += _last_failure(path)
    lines += [f"site {site}: {reason}" for site, reason in idle.items()]
    lines += [
        f"site {site}: {MEANINGS[value]}" + f" in {len(far_rounds)} rounds" * bool(far_rounds)
        for site, values in far.items()
        for value, far_rounds in values.items()
    ]
    complete = summary is not None and summary["status"] in COMPLETE and not idle
    return {
        "ok": complete or (summary is None and running),
        "status": summary["status"] if summary is not None else "running" if running else "not finished",
        "rounds_done": done,
        "rounds": rounds,
        "idle_sites": idle,
        "outliers": far,
        "lines": lines,
    }


def _is_locked(folder: RunFolder) -> bool:
    try:
        with FileLock(folder.path / ".lock", timeout=0):
            return False
    except Timeout:
        return True


def _last_failure(path: Path) -> list[str]:
    """Return why the server stopped last, if the audit log says so."""
    audit = path.with_name(f"{path.name}.audit.jsonl")
    lines = audit.read_text(encoding="utf-8").splitlines() if audit.is_file() else []
    last = json.loads(lines[-1]) if lines else {}
    return [f"{last['error']}: {last['reason']}"] if last.get("event") == "failed" else []
