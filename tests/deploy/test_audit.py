"""The audit log: any change, removal or insertion of a line is found."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel import KeelError
from keel.deploy.audit import GENESIS, AuditLog, verify
from tests.conftest import Called
from tests.deploy.in_process import InProcessFederation


def written(path: Path, lines: int) -> list[str]:
    log = AuditLog(path)
    return [log.append("round", round=number, norms={"0": 0.5 * number}) for number in range(lines)]


def test_lines_are_chained_and_private(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    hashes = written(file, 3)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["previous"] for line in lines] == [GENESIS, *hashes[:2]]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert verify(file).fault is None
    assert verify(file).last_hash == hashes[-1]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_changed_byte_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    written(file, 4)
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    assert verify(file).fault is not None


@settings(max_examples=30, deadline=None)
@given(order=st.lists(st.integers(0, 4), max_size=7))
def test_only_a_start_of_the_log_is_accepted(order: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Removed, repeated and reordered lines are found; missing lines at the end only by a noted hash."""
    file = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    hashes = written(file, 5)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[number] for number in order))
    is_start = order == list(range(len(order)))
    assert (verify(file).fault is None) == is_start
    assert (verify(file, noted=hashes[-1]).fault is None) == (is_start and len(order) == 5)


def test_a_line_that_a_crash_has_cut_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    written(file, 2)
    with file.open("ab") as stream:
        stream.write(b'{"time": "2')
    assert verify(file).fault == "line 3: is not complete"
    AuditLog(file).append("start")
    assert verify(file).lines == 3
    assert verify(file).fault is None


def test_a_file_that_is_not_an_audit_log_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello\n")
    with pytest.raises(KeelError, match="its last line has no hash"):
        AuditLog(tmp_path / "notes").append("start")


def test_the_server_records_sites_rounds_drops_and_refusals(federation: InProcessFederation, keel: Any) -> None:
    def drop(node: int, reply: Any) -> Any:
        return None if node == 2 and reply.metadata.group_id == "2" else reply

    run = federation(drop, participation__rate=1.0, rounds=2)
    file = run.path.with_name("run.audit.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "join", "join", "join", "round", "drop", "round", "end"]
    start, join, dropped, last = lines[0], lines[1], lines[5], lines[6]
    assert len(start["settings"]) == 64
    assert {"site", "node", "fingerprint", "app", "keel", "torch", "flower"} <= set(join)
    assert (dropped["site"], dropped["node"], dropped["reason"]) == (1, 2, "late: no reply within 0.05 s")
    assert {"round", "cohort", "losses", "bytes_up", "seconds"} <= set(last)
    assert lines[-1]["model"] == run.summary["model_sha256"]

    called: Called = keel("deploy", "audit", "verify", str(file))
    assert (called.code, called.out) == (0, f"8 lines, last hash {lines[-1]['hash']}\n")
    file.write_text(file.read_text().replace('"site": 1', '"site": 2', 1))
    called = keel("deploy", "audit", "verify", str(file))
    assert called.code == 1
    assert "line 3: was changed: its hash is wrong" in called.out
