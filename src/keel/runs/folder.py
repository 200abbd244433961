"""A run as a folder of text, JSON and safetensors, readable after a kill at any moment. Nothing is ever unpickled.

spec.toml        the whole experiment, resolved
environment.json what it ran on
data.json        who holds what
metrics.jsonl    a line per round, append-only; no times, so that equal runs have equal files
timings.jsonl    the seconds of each round
checkpoint/      the position to go on from, written aside and moved in
summary.json     how it ended
tracking.json    by what names the trackers know it, where there are any
"""

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from keel.errors import KeelError
from keel.memories import Memories
from keel.rounds import Position, Record
from keel.runs.spec import Spec, read_spec, resolved_spec

DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What safetensors calls them."""


class RunFolder:
    """One run's folder, by its path."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.timings = path / "metrics.jsonl", path / "timings.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoint_file = path / "checkpoint" / "state.safetensors"
        self.memory_file = path / "checkpoint" / "memories.bin"
        self.tracking_file = path / "tracking.json"

    @classmethod
    def create(
        cls, path: Path, spec: Spec, known: dict[str, Any], holdings: dict[str, Any] | None = None
    ) -> "RunFolder":
        """A new folder with its spec and what is `known` of its surroundings. It appears whole or not at all."""
        if path.exists():
            raise FileExistsError(f"{str(path)!r} exists")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(mkdtemp(prefix=".", dir=path.parent))
        try:
            (aside / "checkpoint").mkdir()
            _write(aside / "spec.toml", [spec.to_toml().encode()])
            _write(aside / "environment.json", [(json.dumps(known, indent=2) + "\n").encode()])
            if holdings is not None:
                _write(aside / "data.json", [(json.dumps(holdings) + "\n").encode()])
            _write(aside / "metrics.jsonl", [])
            _write(aside / "timings.jsonl", [])
            aside.chmod(0o755)
            aside.rename(path)
        except BaseException:  # also Ctrl-C: nothing half-made stays
            rmtree(aside, ignore_errors=True)
            raise
        _sync(path.parent)
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
        try:
            return resolved_spec(self.table)
        except KeelError as error:
            raise KeelError(f"{str(self.path / 'spec.toml')!r}: {error}") from None

    @property
    def engine(self) -> str:
        """The engine that was chosen when the run began, kept on resume."""
        return self.environment["engine"]

    @property
    def title(self) -> str:
        """The algorithm's name as people write it."""
        return self.environment["title"]

    @property
    def environment(self) -> dict[str, Any]:
        return json.loads((self.path / "environment.json").read_text(encoding="utf-8"))

    @property
    def holdings(self) -> dict[str, Any] | None:
        """Who holds what, where the run wrote it down."""
        file = self.path / "data.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

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

    def seconds(self) -> list[float]:
        """Of each round."""
        return [line["seconds"] for line in _lines(self.timings)]

    def save(self, position: Position) -> None:
        """The position, moved in when it is whole; until then the one before stays."""
        tensors = {f"server/{name}": tensor.numpy() for name, tensor in position.server.items()}
        memories = position.memories.save()
        form = memories.pop("form")
        tensors |= {f"memory/{name}": array for name, array in memories.items()}
        if position.buffers is not None:
            tensors["buffers"] = position.buffers.numpy()
        tensors |= {f"update/{number:06}": update.numpy() for number, update in enumerate(position.updates)}
        for file in (self.metrics, self.timings):
            _sync(file)  # the lines of every saved round are on disk before the round counts as saved
        write_whole(self.checkpoint_file, _as_safetensors(tensors, {"round": str(position.round), "form": form}))
        position.memories.saved()

    def saved_position(self, memories: Memories | None = None) -> Position | None:
        """The position that was saved last, or None; the clients' memories are put in `memories`."""
        if not self.checkpoint_file.is_file():
            return None
        position = Position(0, {}, Memories(self.memory_file) if memories is None else memories)
        updates: dict[str, Tensor] = {}
        try:
            with safe_open(self.checkpoint_file, framework="pt") as file:
                position.round = int(file.metadata()["round"])
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    match key.split("/"):
                        case ["server", name]:
                            position.server[name] = file.get_tensor(key)
                        case ["buffers"]:
                            position.buffers = file.get_tensor(key)
                        case ["update", _]:
                            updates[key] = file.get_tensor(key)
                clients, rows = (file.get_tensor(f"memory/{name}").numpy() for name in ("clients", "rows"))
                position.memories.restore(clients, rows, file.metadata()["form"])
                position.updates = [updates[key] for key in sorted(updates)]
        except SafetensorError as error:
            damaged = f"run: {str(self.checkpoint_file)!r} is damaged ({error})"
            raise KeelError(f"{damaged}; without it the run starts again from its first round") from error
        return position

    def restore(self, memories: Memories) -> Position | None:
        """The saved position, with the lines of the rounds after it taken back."""
        position = self.saved_position(memories)
        for file in (self.metrics, self.timings):
            kept = [line for line in _lines(file) if line["round"] <= (position.round if position else 0)]
            write_whole(file, ["".join(json.dumps(line) + "\n" for line in kept).encode()])
        self.summary_file.unlink(missing_ok=True)
        return position

    @property
    def tracked_as(self) -> dict[str, str]:
        """The name of this run with each tracker that was told of it."""
        return json.loads(self.tracking_file.read_text(encoding="utf-8")) if self.tracking_file.is_file() else {}

    def remember(self, tracker: str, name: str) -> None:
        """The name by which a resume finds the run with this tracker again."""
        write_whole(self.tracking_file, [(json.dumps({**self.tracked_as, tracker: name}) + "\n").encode()])

    def finish(self, summary: dict[str, Any]) -> None:
        write_whole(self.summary_file, [(json.dumps(summary, indent=2) + "\n").encode()])


def sqlite_address(file: Path) -> str:
    """A database file for SQLAlchemy, in which "?" and "%" have a meaning of their own."""
    from sqlalchemy.engine import URL, make_url  # comes with the extras that have databases

    path = str(file.absolute())
    plain, quoted = f"sqlite:///{path}", URL.create("sqlite", database=path).render_as_string()
    for address in (plain, quoted):
        if make_url(address).database == path:
            return address
    raise KeelError(f"out: {path!r} cannot be a database's address; accepted: a path without '?'")


def environment() -> dict[str, Any]:
    """What a run's bits may depend on besides its spec."""
    package = Path(__file__).parents[1]
    source = sha256(b"".join(file.read_bytes() for file in sorted(package.rglob("*.py"))))
    return {
        "keel": version("keel-fl"),
        "source_sha256": source.hexdigest(),
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
    try:
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except json.JSONDecodeError as error:
        raise KeelError(f"run: {str(file)!r} is damaged: a line of it is not JSON ({error})") from None


def _as_safetensors(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in parts, one tensor after the other, which may lie in files: the library would copy them all.

    Its length comes first, then a table of contents, then the numbers.
    """
    contents: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        contents[name] = {"dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
    table = json.dumps(contents).encode()
    table += b" " * (-len(table) % 8)
    yield len(table).to_bytes(8, "little") + table
    for array in tensors.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_whole(file: Path, content: Iterable[bytes | memoryview]) -> None:
    """The file with this content, moved in when it is whole; until then the one before stays."""
    aside = file.with_name(f".{file.name}.new")
    try:
        _write(aside, content)
        aside.replace(file)
        _sync(file.parent)
    finally:
        aside.unlink(missing_ok=True)


def _write(file: Path, content: Iterable[bytes | memoryview]) -> None:
    with file.open("wb") as stream:
        stream.writelines(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
