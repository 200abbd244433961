"""Measures wall-clock time per round and memory of Keel, the limit, a plain loop and other frameworks.

    make bench                                   # all workloads; writes results/performance.json and its page
    make bench-quick                             # the same in under ten minutes: fewer rounds, repetitions and peers
    python benchmarks/rounds.py digits many      # some workloads
    python benchmarks/rounds.py --guard          # without other frameworks; fails if a ratio exceeds its guard

Each contender runs in a new process. The contenders alternate within a repetition, so that other load on the machine
affects all of them. Compare ratios: seconds depend on the machine. The seconds of every repetition are stored.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from page import DEVICE_RESULTS, PEERS, RESULTS, ratio, write
from workloads import COUNTS, WORKLOADS

HERE = Path(__file__).parent
REPETITIONS = 3
QUICK_REPETITIONS = 2
QUICK_ROUNDS = {"lenet": 1, "resnet20": 1, "shakespeare": 1}
"""The largest number of rounds per repetition in the quick mode; 20 for the other workloads."""
MANY_REPETITIONS = 9
"""For workloads whose contenders differ by little."""
TIMEOUT = 900.0
"""Seconds after which a contender is stopped."""
GUARDS = {
    "digits": {"class of limit": 0.4, "processor serial of one": 0.85},
    "many": {"class of limit": 0.4},
    "layernorm": {"class of limit": 0.5, "processor serial of one": 1.1},
    "cnn": {"class of limit": 0.8, "processor serial of one": 1.1},
    "transformer": {"class of limit": 1.15, "processor serial of one": 1.1},
    "lenet": {"class of limit": 1.0, "keel of limit": 0.95},
    "resnet20": {"class of limit": 1.15, "keel of limit": 1.15},
    "shakespeare": {"class of limit": 1.15},
    "stateful": {"fedhbm of keel": 1.15, "scaffold of keel": 1.15},
    "clients": {
        "n=1,000,000 of n=1,000": 1.5,
        "memory n=1,000,000 of n=1,000": 1.15,
        "start n=1,000,000 of n=1,000": 2.0,
    },
}
"""The largest accepted ratio of one contender's seconds (or memory, or start-up) to another's. Where rounds take
milliseconds it is well above the ratio on an idle machine, where they take seconds about a fifth above it.
"""
SMALL_DIFFERENCES = {
    "stateful": {name: (name, "lenet") for name in ("keel", "fedhbm", "scaffold")},
    "clients": {name: ("keel", name) for name in COUNTS},
}
"""Workloads of this script alone: algorithms with client state, and numbers of clients. Each contender is given by the
contender and the workload of own.py."""
DEVICE_WORKLOADS = ("digits", "many", "layernorm", "cnn", "transformer", "lenet", "resnet20")
"""The workloads that are measured on accelerators."""
Repetition = dict[str, float]
"""What own.py or peers.py prints, and the peak memory of all processes in MB."""


def measure_device(device: str) -> None:
    """Measure the user's classes on an accelerator next to a plain loop on it, and write the page."""
    rows: dict[str, Any] = {}
    for name in DEVICE_WORKLOADS:
        repetitions: dict[str, list[Repetition]] = {contender: [] for contender in ("class", "one")}
        for _ in range(REPETITIONS):
            for contender, measured in repetitions.items():
                measured.append(repeat(contender, name, "--device", device))
        rows[name] = {contender: _medians(measured) for contender, measured in repetitions.items()}
        print(name, *(f"{contender} {row['seconds']:.4f} s" for contender, row in rows[name].items()), flush=True)
    DEVICE_RESULTS.write_text(json.dumps({"device": device, "rows": rows}, indent=2) + "\n")
    write()


def contenders(name: str, with_peers: bool, quick: bool) -> list[str]:
    if name in SMALL_DIFFERENCES:
        return list(SMALL_DIFFERENCES[name])
    work = WORKLOADS[name]
    names = ["class", *(["keel"] if work.built_in else []), "limit"]
    if not quick:
        names += ["serial", "one"] if name != "many" else []
        names += [] if work.heavy else ["compiled"]
    elif name in ("digits", "layernorm", "cnn", "transformer"):
        names += ["serial", "one"]
    if not with_peers:
        return names
    if quick:
        return [*names, "naive", "pfl-processes"]
    peers = ["flower", "pfl-processes"] if work.heavy else ["flower", "flower-legacy", "pfl", "pfl-processes"]
    return [*names, "naive", *peers]


def repeat(contender: str, workload: str, *options: str) -> Repetition:
    """Run one contender in a process, with options of its script, and return what it measured."""
    arguments = [*SMALL_DIFFERENCES.get(workload, {}).get(contender, (contender, workload))]
    script = "peers.py" if arguments[0] in PEERS else "own.py"
    command = [sys.executable, str(HERE / script), *arguments, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak, began = 0.0, time.monotonic()
    while process.poll() is None and (now := time.monotonic()) - began < TIMEOUT:
        peak = max(peak, memory_of(process.pid))
        time.sleep(max(0.2, 100 * (time.monotonic() - now)))  # sampling takes at most 1 % of a core
    process.terminate()
    out, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{contender} failed on {workload}:\n{errors[-2000:]}")
    measured = json.loads(out)
    return {**measured, "memory": max(peak, measured.get("peak", 0.0))}


def memory_of(root: int) -> float:
    """The memory of a process and its descendants in MB; memory that they share counts once."""
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
    return sum(map(_proportional_memory, family))


def _proportional_memory(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def measure(name: str, with_peers: bool, quick: bool) -> dict[str, Any]:
    """The medians over the repetitions of each contender, and the seconds of each repetition."""
    names = contenders(name, with_peers, quick)
    repetitions: dict[str, list[Repetition]] = {contender: [] for contender in names}
    count = QUICK_REPETITIONS if quick else MANY_REPETITIONS if name in SMALL_DIFFERENCES else REPETITIONS
    options = ["--rounds", str(QUICK_ROUNDS.get(name, 20))] if quick else []
    for _ in range(count):
        for contender in names:
            repetitions[contender].append(repeat(contender, name, *options))
    return {contender: _medians(measured) for contender, measured in repetitions.items()}


def _medians(repetitions: list[Repetition]) -> dict[str, Any]:
    keys = [key for key in ("seconds", "processor", "start", "memory", "rest") if key in repetitions[0]]
    medians = {key: round(median(measured[key] for measured in repetitions), 5) for key in keys}
    return {**medians, "turns": [round(measured["seconds"], 5) for measured in repetitions]}


def exceeded_guards(name: str, row: dict[str, Any]) -> list[str]:
    """A message for each guard that the measurements of a workload exceed."""
    messages = []
    for guard, largest in GUARDS[name].items():
        *kinds, one, _, other = guard.split()
        kind = kinds[0] if kinds else "seconds"
        if (measured := row[one][kind] / row[other][kind]) > largest:
            messages.append(f"{name}: {guard} is {measured:.2f}, its guard is {largest}")
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *GUARDS], metavar="WORKLOAD")
    parser.add_argument("--guard", action="store_true", help="fail if a ratio exceeds its guard; write nothing")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, repetitions and peers")
    parser.add_argument("--device", help="measure on an accelerator, such as cuda, and write its table")
    arguments = parser.parse_args()
    if arguments.device:
        measure_device(arguments.device)
        return
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"{'workload':12} {'contender':14} {'s/round':>10} {'relative':>9} {'start s':>8} {'MB':>7}  repetitions")
    failures = []
    for name in arguments.workloads or list(GUARDS):
        rows[name] = row = measure(name, with_peers=not arguments.guard, quick=arguments.quick)
        for contender, values in row.items():
            relative = ratio(row, contender, next(iter(row)))
            figures = f"{values['seconds']:10.4f} {relative:9.2f} {values.get('start', 0):8.1f} {values['memory']:7.0f}"
            print(f"{name:12} {contender:14} {figures}  {' '.join(map(str, values['turns']))}", flush=True)
        failures += exceeded_guards(name, row)
        if not arguments.guard:
            RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    if not arguments.guard:
        write()
    elif failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
