"""Damaged run folders: a changed, lost or added byte, or a file of another run, is found and changes no result."""

from pathlib import Path
from random import Random

import keel
from faults._runs import ALGORITHMS, copy, finished, interrupted, result
from keel.errors import DamagedFile, KeelError
from keel.runs.folder import RunFolder
from keel.runs.repair import repair
from keel.runs.verify import damages

KINDS = ("flip", "overwrite", "lose", "insert", "truncate", "zero", "append", "other", "delete")


def check(seed: int, folder: Path) -> str | None:
    random = Random(seed)
    algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
    ended = random.random() < 0.5
    run = copy((finished if ended else interrupted)(algorithm), folder)
    file = random.choice(sorted(file for file in run.path.rglob("*") if file.is_file()))
    what = (
        f"{algorithm}, {'finished' if ended else 'interrupted'}, {_damage(run, file, algorithm, random)} of {file.name}"
    )
    if not damages(run):  # a deleted summary, the row of a client that has a newer one: nothing that a result needs
        keel.resume(run.path)
        return None if _same(run, algorithm) else f"{what}: verify reports nothing, and the result is another one"
    if not ended and (wrong := _continued(run, algorithm)):
        return f"{what}, resume: {wrong}"
    try:
        repair(run)
    except DamagedFile as error:
        return f"{what}, repair: {error}"
    except KeelError:
        return None  # it says that nothing can restore the file
    if left := damages(run):
        return f"{what}: after repair {left[0]}"
    keel.resume(run.path)
    return None if _same(run, algorithm) else f"{what}, resume after repair: another result"


def _continued(run: RunFolder, algorithm: str) -> str | None:
    """Resume the run; a refusal is right, another result is not."""
    try:
        keel.resume(run.path)
    except DamagedFile:
        return None
    return None if _same(run, algorithm) else "another result"


def _same(run: RunFolder, algorithm: str) -> bool:
    return result(run.path) == result(finished(algorithm))


def _damage(run: RunFolder, file: Path, algorithm: str, random: Random) -> str:
    """Damage a file of the run, and return how."""
    content = bytearray(file.read_bytes())
    at = random.randrange(len(content)) if content else 0
    kind = random.choice(KINDS if content else ("delete", "append"))
    if kind == "flip":
        content[at] ^= 1 << random.randrange(8)
    elif kind == "overwrite":
        content[at] = (content[at] + random.randrange(1, 256)) % 256
    elif kind == "lose":
        del content[at : at + random.randint(1, 8)]
    elif kind == "insert":
        content[at:at] = random.randbytes(random.randint(1, 8))
    elif kind == "truncate":
        del content[at:]
    elif kind == "zero":
        end = min(len(content), at + 512)
        if not any(content[at:end]):
            content[at] = 1
        else:
            content[at:end] = bytes(end - at)
    elif kind == "append":
        content += random.randbytes(3)
    elif kind == "other":
        other = finished(algorithm, seed=1) / file.relative_to(run.path)
        content = bytearray(other.read_bytes() if other.exists() else b"")
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(content)
    return f"{kind} at byte {at}"
