"""Inject faults: python -m faults [KIND ...] [--cases N] [--seed S] [--seconds S]

Prints one line for each kind, and for each failure the command that repeats that case alone. The exit code is 1 if any
case failed.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory

import faults
from faults._tally import injected

Check = Callable[[int, Path], str | None]

KINDS = sorted(module.name for module in iter_modules(faults.__path__) if not module.name.startswith("_"))
SLOW = ("federation_kills", "ray_kills")
"""Kinds whose cases take minutes: they run only if they are named."""
SHOWN = 5
"""How many failures of a kind are printed."""


def failure(check: Check, seed: int) -> str | None:
    """What went wrong in one case, or None."""
    with TemporaryDirectory(prefix="keel-fault-") as folder:
        try:
            return check(seed, Path(folder))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def run_kind(kind: str, cases: int, seed: int, seconds: float) -> int:
    """Run the cases of one kind, print its line, and return the number of failures."""
    check: Check = import_module(f"faults.{kind}").check
    begin = time.monotonic()
    failures = tried = 0
    injected.clear()
    for number in count(seed):
        if tried == cases or time.monotonic() - begin > seconds:
            break
        tried += 1
        if (line := failure(check, number)) is not None:
            failures += 1
            if failures <= SHOWN:
                print(f"  {line}\n    python -m faults {kind} --seed {number} --cases 1", flush=True)
    elapsed = time.monotonic() - begin
    faults_of_cases = "".join(f"  {number:,} {name}" for name, number in injected.items())
    print(f"{kind:<14} {tried:>9,} cases {failures:>6,} failures {elapsed:>8.1f} s{faults_of_cases}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__.splitlines()[0])
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)}; by default all but {' and '.join(SLOW)}"
    )
    parser.add_argument("--cases", type=int, default=20, metavar="N", help="cases of each kind (default: 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first case (default: 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="limit for each kind")
    arguments = parser.parse_args()
    logging.getLogger("keel").setLevel(logging.ERROR)  # a run that continues from an older checkpoint warns
    unknown = [kind for kind in arguments.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}; use one of {', '.join(KINDS)}")
    kinds = arguments.kinds or [kind for kind in KINDS if kind not in SLOW]
    return min(1, sum(run_kind(kind, arguments.cases, arguments.seed, arguments.seconds) for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
