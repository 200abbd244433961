"""Seconds per round and memory of Keel, of the limit, of a plain loop and of other frameworks, measured in turns.

    make bench                                   # all workloads and peers; writes results/performance.json and the page
    python benchmarks/rounds.py digits many      # some of them
    python benchmarks/rounds.py --guard          # no peers; fails where Keel takes more than its guards allow

Each contender runs in a process of its own, one after the other, and round again: what else the machine does is
everybody's. Ratios count; seconds depend on the machine. Every turn is kept.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from page import PEERS, RESULTS, ratio, write
from workloads import COUNTS, WORKLOADS

HERE = Path(__file__).parent
TURNS, OFTEN = 3, 9
"""Of a contender; where the differences are small, of those that are to be told apart."""
PATIENCE = 900.0
"""Seconds after which a contender is given up."""
GUARDS = {
    "digits": {"keel of limit": 0.4},
    "many": {"keel of limit": 0.4},
    "lenet": {"keel of limit": 0.95, "keel of bare": 1.25},
    "resnet20": {"keel of limit": 1.15, "keel of bare": 1.25},
    "shakespeare": {"keel of limit": 1.15},
    "stateful": {"fedhbm of keel": 1.15, "scaffold of keel": 1.15},
    "clients": {
        "n=1,000,000 of n=1,000": 1.5,
        "memory n=1,000,000 of n=1,000": 1.15,
        "start n=1,000,000 of n=1,000": 2.0,
    },
}
"""What the seconds (or the memory, or the start-up) of one contender over those of another are not to exceed: well
above what was measured on a quiet machine where rounds take milliseconds, a fifth above where they take seconds.
"""
SMALL_DIFFERENCES = {
    "stateful": {name: (name, "lenet") for name in ("keel", "fedhbm", "scaffold")},
    "clients": {name: ("keel", name) for name in COUNTS},
}
"""Each contender as own.py knows it, and the workload: methods with memories, and numbers of clients."""
Turn = dict[str, float]


def contenders(name: str, with_peers: bool) -> list[str]:
    if name in SMALL_DIFFERENCES:
        return list(SMALL_DIFFERENCES[name])
    heavy = WORKLOADS[name].heavy
    names = ["keel", "limit"]
    names += (["bare", "published"] if name in ("lenet", "resnet20") else []) if heavy else ["compiled"]
    peers = ["flower", "pfl-processes"] if heavy else ["flower", "flower-legacy", "pfl", "pfl-processes"]
    return [*names, *(["naive", *peers] if with_peers else [])]


def turn(contender: str, workload: str) -> Turn:
    """One process from its start to its end: seconds per round, seconds of start-up, the most memory in MB."""
    asked = SMALL_DIFFERENCES.get(workload, {}).get(contender, (contender, workload))
    command = [sys.executable, str(HERE / ("peers.py" if asked[0] in PEERS else "own.py")), *asked]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most, began = 0.0, time.monotonic()
    while process.poll() is None and (looked := time.monotonic()) - began < PATIENCE:
        most = max(most, memory_of(process.pid))
        time.sleep(max(0.2, 100 * (time.monotonic() - looked)))  # looking takes time from those who are looked at
    process.terminate()
    out, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{contender} failed on {workload}:\n{errors[-2000:]}")
    told = json.loads(out)
    return {**told, "memory": max(most, told.get("peak", 0.0))}


def memory_of(root: int) -> float:
    """Megabytes of a process and all below it; what several share counts once."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
    family = {root}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(map(_share, family))


def _share(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def measure(name: str, with_peers: bool) -> dict[str, Any]:
    """For each contender the medians of its turns, and the seconds of each."""
    names = contenders(name, with_peers)
    turns: dict[str, list[Turn]] = {contender: [] for contender in names}
    for _ in range(OFTEN if name in SMALL_DIFFERENCES else TURNS):
        for contender in names:
            turns[contender].append(turn(contender, name))
    return {contender: _medians(found) for contender, found in turns.items()}


def _medians(turns: list[Turn]) -> dict[str, Any]:
    keys = [key for key in ("seconds", "start", "memory", "rest") if key in turns[0]]
    medians = {key: round(median(each[key] for each in turns), 5) for key in keys}
    return {**medians, "turns": [round(each["seconds"], 5) for each in turns]}


def broken(name: str, found: dict[str, Any]) -> list[str]:
    """The guards that a workload's seconds break."""
    told = []
    for words, most in GUARDS[name].items():
        *what, one, _, other = words.split()
        kind = what[0] if what else "seconds"
        if (of := found[one][kind] / found[other][kind]) > most:
            told.append(f"{name}: {words} {of:.2f}, above {most}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *GUARDS], metavar="WORKLOAD")
    parser.add_argument("--guard", action="store_true", help="fail where a ratio is above its guard; keep nothing")
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"{'workload':12} {'contender':14} {'s a round':>10} {'of first':>9} {'start s':>8} {'MB':>7}  turns")
    worse = []
    for name in arguments.workloads or list(GUARDS):
        rows[name] = found = measure(name, with_peers=not arguments.guard)
        for contender, values in found.items():
            of = ratio(found, contender, next(iter(found)))
            figures = f"{values['seconds']:10.4f} {of:9.2f} {values.get('start', 0):8.1f} {values['memory']:7.0f}"
            print(f"{name:12} {contender:14} {figures}  {' '.join(map(str, values['turns']))}", flush=True)
        worse += broken(name, found)
        if not arguments.guard:
            RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    if not arguments.guard:
        write()
    elif worse:
        raise SystemExit("\n".join(worse))


if __name__ == "__main__":
    main()
