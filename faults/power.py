"""Power loss: whatever the disk has kept of what was not synced, the run continues to the same bits.

A run is recorded once, operation by operation. A case cuts the power after one of them. Of a file, the disk then has
the content of its last sync or any later one, perhaps cut short; of a folder, the entries of its last sync and any of
the later creations, renames and deletions, in any selection. The run is resumed from there.
"""

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import keel
from faults._runs import ALGORITHMS, finished, result, spec
from keel.runs import execute

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"}
Inode = tuple[int, int]
"""The number of an inode, and how often the number has been used."""
Entries = dict[str, Inode]
"""The paths below the root with their inodes; the root is "."""


@dataclass
class Moment:
    """The file system as programs see it, and what was synced at this moment, if anything was."""

    entries: Entries
    contents: dict[Inode, bytes | None]
    """The content of each inode; None for a folder."""
    synced: Inode | None = None


@dataclass
class Recording:
    root: Path
    moments: list[Moment] = field(default_factory=list)
    uses: Counter[int] = field(default_factory=Counter)

    def add(self, synced: int | None = None) -> None:
        entries: Entries = {}
        contents: dict[Inode, bytes | None] = {}
        before = self.moments[-1].contents if self.moments else {}
        for path in [self.root, *sorted(self.root.rglob("*"))]:
            number = path.stat().st_ino
            if (number, self.uses[number]) not in before | contents:
                self.uses[number] += 1
            inode = number, self.uses[number]
            entries[str(path.relative_to(self.root))] = inode
            contents[inode] = None if path.is_dir() else path.read_bytes()
        self.moments.append(Moment(entries, contents, None if synced is None else (synced, self.uses[synced])))


_active: list[Recording] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in CHANGES and _active and str(arguments[0]).startswith(str(_active[0].root)):
        recording = _active.pop()  # what the recording itself opens is not recorded
        recording.add()
        _active.append(recording)


sys.addaudithook(_audit)


@cache
def recorded(algorithm: str) -> Recording:
    """The operations of a run that writes a checkpoint after each round."""
    recording, sync = Recording(Path(mkdtemp(prefix="keel-power-"))), os.fsync

    def recorded_sync(descriptor: int) -> None:
        active = _active.pop()
        active.add()
        sync(descriptor)
        active.add(os.fstat(descriptor).st_ino)
        _active.append(active)

    _active.append(recording)
    with patch("os.fsync", recorded_sync), patch.multiple(execute, CHECKPOINT_SECONDS=-1.0, SAVING_SHARE=0):
        keel.run(spec(algorithm), out=recording.root / "run")
    _active.pop()
    recording.add()
    return recording


def check(seed: int, folder: Path) -> str | None:
    random = Random(seed)
    algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
    recording = recorded(algorithm)
    cut = random.randrange(len(recording.moments))
    for path, content in sorted(_after_power_loss(recording.moments[: cut + 1], random).items()):
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        elif (folder / path).parent.is_dir():
            (folder / path).write_bytes(content)
    run = folder / "run"
    if run.exists():
        keel.resume(run)
    else:
        keel.run(spec(algorithm), out=run)
    same = result(run) == result(finished(algorithm))
    return None if same else f"{algorithm}, operation {cut}: another result"


def _after_power_loss(moments: list[Moment], random: Random) -> dict[str, bytes | None]:
    """The files and folders on the disk, by path."""
    entries: Entries = {}
    in_order, lost = random.random() < 0.5, False  # most file systems keep the order of changes to folders
    for number, (before, after) in enumerate(zip([Moment({}, {}), *moments], moments, strict=False)):
        names = before.entries.keys() | after.entries.keys()
        change = {
            path: after.entries.get(path) for path in names if before.entries.get(path) != after.entries.get(path)
        }
        if not change:
            continue
        folder = str(Path(min(change, key=len)).parent)
        durable = any(moment.synced == after.entries[folder] for moment in moments[number:])
        if durable or (random.random() < 0.7 and not (in_order and lost)):
            _apply(entries, change)
        else:
            lost = True
    return {path: _content(moments, inode, random) for path, inode in entries.items()}


def _apply(entries: Entries, change: dict[str, Inode | None]) -> None:
    """Apply one operation. A renamed folder has the entries that it had."""
    before = set(entries.values())
    for path, inode in change.items():
        if inode is None:
            entries.pop(path, None)
        elif str(Path(path).parent) not in change or inode in before:
            entries[path] = inode


def _content(moments: list[Moment], inode: Inode, random: Random) -> bytes | None:
    """The content of the last sync, or a later one, perhaps cut short."""
    versions: list[bytes | None] = [b""]
    for moment in moments:
        if inode in moment.contents:
            versions.append(moment.contents[inode])
        if moment.synced == inode:
            versions = versions[-1:]
    if versions[-1] is None:
        return None
    content = random.choice(versions) or b""
    durable = versions[0] or b""
    if content != durable and content.startswith(durable):
        return content[: random.randint(len(durable), len(content))]
    return content
