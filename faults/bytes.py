"""Single damaged bytes, 100 in each case: `keel verify` finds them, or they are in nothing that a result needs."""

from pathlib import Path
from random import Random
from shutil import copytree

import keel
from faults._runs import ALGORITHMS, copy, finished, interrupted, result
from faults._tally import injected
from keel.runs.folder import RunFolder
from keel.runs.verify import damages

BYTES = 100


def check(seed: int, folder: Path) -> str | None:
    random = Random(seed)
    algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
    source = random.choice((finished, interrupted))(algorithm)
    run = copy(source, folder)
    files = sorted(file for file in run.path.rglob("*") if file.is_file() and file.stat().st_size)
    for number in range(BYTES):
        file = random.choice(files)
        intact = file.read_bytes()
        at = random.randrange(len(intact))
        value = (intact[at] + random.randrange(1, 256)) % 256
        file.write_bytes(intact[:at] + bytes([value]) + intact[at + 1 :])
        injected["damaged bytes"] += 1
        if not damages(run):
            unused = RunFolder(copytree(run.path, folder / str(number)))
            keel.resume(unused.path)
            if result(unused.path) != result(finished(algorithm)):
                return f"{algorithm}: verify does not find byte {at} of {file.name}, and the result is another one"
        file.write_bytes(intact)
    return f"{algorithm}: {damages(run)[0]}" if damages(run) else None
