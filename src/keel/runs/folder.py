"""A run as a folder of text, JSON and safetensors, readable after a kill at any moment. Nothing is ever unpickled.

spec.toml        the whole experiment, resolved
environment.json what it ran on
metrics.jsonl    a line per round, append-only; no times, so that equal runs have equal files
timings.jsonl    the seconds of each round
checkpoint/      the position to go on from, written aside and moved in
summary.json     how it ended
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open

from keel.errors import KeelError
from keel.rounds import Position, Record
from keel.runs.spec import Spec, make_spec, read_spec


class RunFolder:
    """One run's folder, by its path."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.timings = path / "metrics.jsonl", path / "timings.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoint_file = path / "checkpoint" / "state.safetensors"

    @classmethod
    def create(cls, path: Path, spec: Spec, engine: str) -> "RunFolder":
        """A new folder. It appears whole or not at all."""
        if path.exists():
            raise KeelError(f"out: {str(path)!r} exists; accepted: a new folder, or keel resume {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.mkdir()
        (aside / "spec.toml").write_text(spec.to_toml(), encoding="utf-8")
        (aside / "environment.json").write_text(
            json.dumps(environment(spec, engine), indent=2) + "\n", encoding="utf-8"
        )
        (aside / "checkpoint").mkdir()
        (aside / "metrics.jsonl").touch()
        (aside / "timings.jsonl").touch()
        aside.rename(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        if not (path / "spec.toml").is_file():
            raise KeelError(f"run: {str(path)!r} is not a run folder (no spec.toml); accepted: what keel run made")
        return cls(path)

    @property
    def table(self) -> dict[str, Any]:
        """The resolved spec as it is written."""
        return read_spec(self.path / "spec.toml")

    @property
    def spec(self) -> Spec:
        return make_spec(self.table)

    @property
    def engine(self) -> str:
        """The engine that was chosen when the run began, kept on resume."""
        return self._environment["engine"]

    @property
    def title(self) -> str:
        """The algorithm's name as people write it."""
        return self._environment["title"]

    @property
    def _environment(self) -> dict[str, Any]:
        return json.loads((self.path / "environment.json").read_text(encoding="utf-8"))

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return json.loads(self.summary_file.read_text(encoding="utf-8")) if self.summary_file.is_file() else None

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do: finished or diverged."""
        summary = self.summary
        return summary is not None and summary["status"] != "interrupted"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout:
            raise KeelError(f"run: {str(self.path)!r} is being written by another process") from None

    def append(self, record: Record, seconds: float) -> None:
        for file, line in (self.metrics, record), (self.timings, {"round": record["round"], "seconds": seconds}):
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

    def records(self) -> list[Record]:
        return _lines(self.metrics)

    def seconds(self) -> float:
        return sum(line["seconds"] for line in _lines(self.timings))

    def save(self, position: Position) -> None:
        """The position, moved in when it is whole; until then the one before stays."""
        tensors = {f"server/{name}": tensor.numpy() for name, tensor in position.server.items()}
        for client, memory in position.memories.items():
            tensors |= {f"memory/{client}/{name}": tensor.numpy() for name, tensor in memory.items()}
        content = safetensors.numpy.save(tensors, metadata={"round": str(position.round)})
        for file in (self.metrics, self.timings):
            _sync(file)  # the lines of every saved round are on disk before the round counts as saved
        _replace(self.checkpoint_file, content)

    def saved_position(self) -> Position | None:
        """The position that was saved last, or None."""
        if not self.checkpoint_file.is_file():
            return None
        position = Position(0, {})
        with safe_open(self.checkpoint_file, framework="pt") as file:
            position.round = int(file.metadata()["round"])
            for key in file.keys():  # noqa: SIM118 (not a dict)
                match key.split("/"):
                    case ["server", name]:
                        position.server[name] = file.get_tensor(key)
                    case ["memory", client, name]:
                        position.memories.setdefault(int(client), {})[name] = file.get_tensor(key)
        return position

    def restore(self) -> Position | None:
        """The saved position, with the lines of the rounds after it taken back."""
        position = self.saved_position()
        for file in (self.metrics, self.timings):
            kept = [line for line in _lines(file) if line["round"] <= (position.round if position else 0)]
            _replace(file, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.summary_file.unlink(missing_ok=True)
        return position

    def finish(self, summary: dict[str, Any]) -> None:
        _replace(self.summary_file, (json.dumps(summary, indent=2) + "\n").encode())


def environment(spec: Spec, engine: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "title": spec.algorithm.title,
        "keel": version("keel-fl"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: a kill can leave the last one cut short."""
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _replace(file: Path, content: bytes) -> None:
    aside = file.with_name(f".{file.name}.new")
    try:
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
