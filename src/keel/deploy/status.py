"""`keel deploy status`: how a training is, from its run folder alone."""

import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from keel.core.records import COMPLETE
from keel.deploy.audit import verify
from keel.deploy.watch import MEANINGS, outliers
from keel.errors import KeelError
from keel.runs.folder import RunFolder


def training_status(path: Path) -> dict[str, Any]:
    """Return the state of a training: `ok`, `lines` to print, the rounds, idle sites and outliers."""
    if not path.exists() and (audit := _audit_lines(path)):
        return _status_before_first_round(path, audit)
    folder = RunFolder.open(path)
    summary, rounds = folder.summary, folder.spec.rounds
    records, running = folder.records(), _is_locked(folder)
    done = len(records)
    idle: dict[str, str] = {} if summary is None else summary.get("idle_sites", {})
    far = outliers(records) if summary is None else summary.get("outliers", {})
    lines = []
    if summary is not None:
        lines.append(f"{summary['status']} after {done} of {rounds} rounds: {path}")
    elif running:
        lines.append(f"running: {done} of {rounds} rounds: {path}")
    else:
        lines.append(f"not finished: {done} of {rounds} rounds; the same flwr run resumes: {path}")
        lines += _failure((_audit_lines(path) or [{}])[-1])
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


def _status_before_first_round(path: Path, audit: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a training whose run folder does not exist yet: the server waits for its sites."""
    starts = [number for number, line in enumerate(audit) if line["event"] == "start"]
    current = audit[starts[-1] :] if starts else audit
    waits = current[-1]["event"] != "failed"
    joined = sorted({line["site"] for line in current if line["event"] == "join"})
    refused = {line["node"]: line["reason"] for line in current if line["event"] == "refusal"}
    connected = f"site {', '.join(map(str, joined))} connected" if joined else "no site connected"
    first = f"waiting for its sites since {current[0]['time']}, {connected}: {path}"
    lines = [first if waits else f"not started: {path}", *_failure(current[-1])]
    lines += [f"node {node} refused: {reason}" for node, reason in refused.items()]
    return {
        "ok": waits,
        "status": "waiting" if waits else "not started",
        "rounds_done": 0,
        "rounds": None,
        "idle_sites": {},
        "outliers": {},
        "lines": lines,
    }


def _is_locked(folder: RunFolder) -> bool:
    try:
        with FileLock(folder.path / ".lock", timeout=0):
            return False
    except Timeout:
        return True


def _audit_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the audit log of a run. The last one may be incomplete while the server writes it."""
    audit = path.with_name(f"{path.name}.audit.jsonl")
    text = audit.read_text(encoding="utf-8", errors="replace") if audit.is_file() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if (fault := verify(audit).fault if lines else None) is not None and "is not complete" not in fault:
        raise KeelError(f"audit log {str(audit)!r} is damaged: {fault}; keel deploy audit verify checks it")
    return [json.loads(line) for line in lines]


def _failure(line: dict[str, Any]) -> list[str]:
    """Return why the server stopped, if this line of the audit log says so."""
    return [f"{line['error']}: {line['reason']}"] if line.get("event") == "failed" else []
