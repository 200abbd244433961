"""The time in which long logs are read."""

import gc
from pathlib import Path
from typing import Any

from keel.runs.sealed import seal
from keel.runs.validation import read_records

RECORD = {"cohort": [1, 2], "bytes_down": 10, "bytes_up": 10, "accuracy": 0.5}


def test_the_garbage_collector_pauses_while_many_records_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(seal({**RECORD, "round": t}) for t in range(1, 20_001)))
    collections: list[Any] = []
    gc.collect()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        assert len(read_records(file, sealed=True)) == 20_000
    finally:
        gc.callbacks.pop()
    assert len(collections) <= 4
    assert gc.isenabled()
