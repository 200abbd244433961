"""Seconds per round and memory of Keel, of the limit, of a plain loop and of other frameworks, measured in turns.

    make bench                                   # all workloads and peers: a table, results/performance.json, a plot
    python benchmarks/rounds.py digits many      # some of them, with the peers that are installed
    python benchmarks/rounds.py --guard          # no peers; fails where Keel adds more than its guard allows

Each contender runs in a process of its own, one after the other, and round again: what else the machine does is
everybody's. Ratios count; seconds depend on the machine.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import altair
from workloads import WORKLOADS

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "performance.json"
PLOT = HERE.parent / "docs" / "performance.svg"
TURNS = 3
PATIENCE = 900.0
"""Seconds after which a contender is given up."""


def contenders(name: str, with_peers: bool) -> list[str]:
    work, names = WORKLOADS[name], ["keel", "limit"]
    if work.model in ("lenet", "resnet20"):
        names.append("bare")
    if work.algorithm != "fedavg" or name.startswith("n="):
        return names
    heavy = work.rounds == 1
    peers = {"flwr": ["flower"] if heavy else ["flower", "flower-legacy"]}
    peers["pfl"] = ["pfl-processes"] if heavy else ["pfl", "pfl-processes"]
    installed = [name for package, own in peers.items() if with_peers and find_spec(package) for name in own]
    return [*names, *([] if heavy else ["naive"]), *installed]


def turn(contender: str, workload: str) -> dict[str, float]:
    """One process from its start to its end: seconds per round, seconds of start-up, the most memory in MB."""
    script = "own.py" if contender in ("keel", "limit", "bare", "naive") else "peers.py"
    command = [sys.executable, str(HERE / script), contender, workload]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most, began = 0.0, time.monotonic()
    while process.poll() is None and (looked := time.monotonic()) - began < PATIENCE:
        most = max(most, memory_of(process.pid))
        time.sleep(max(0.2, 100 * (time.monotonic() - looked)))  # looking takes time from those who are looked at
    process.terminate()
    out, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{contender} failed on {workload}:\n{errors[-2000:]}")
    return {**json.loads(out), "memory": most}


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


def measure(name: str, with_peers: bool) -> dict[str, dict[str, float]]:
    """Medians of turns."""
    names = contenders(name, with_peers)
    turns: dict[str, list[dict[str, float]]] = {contender: [] for contender in names}
    for _ in range(TURNS):
        for contender in names:
            turns[contender].append(turn(contender, name))
    return {
        contender: {key: round(median(each[key] for each in found), 5) for key in ("seconds", "start", "memory")}
        for contender, found in turns.items()
    }


def plot(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    """Each contender's time as a multiple of the limit."""
    points = [
        {"workload": name, "contender": contender, "of the limit": values["seconds"] / row["limit"]["seconds"]}
        for name, row in rows.items()
        if "pfl-processes" in row
        for contender, values in row.items()
        if contender != "limit"
    ]
    base = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X("of the limit:Q", scale=altair.Scale(type="log"), title="round time, as a multiple of the limit"),
        y=altair.Y("workload:N", sort=list(rows), title=None),
        color=altair.Color("contender:N", scale=altair.Scale(scheme="tableau10"), title=None),
        shape=altair.Shape("contender:N", title=None),
    )
    base.mark_point(size=90, filled=True).properties(width=520, height=180).save(str(PLOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], metavar="WORKLOAD")
    parser.add_argument(
        "--guard", action="store_true", help="fail where Keel takes more of the bare steps than its guard"
    )
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"{'workload':15} {'contender':14} {'s a round':>10} {'of limit':>9} {'start s':>8} {'MB':>7}")
    worse = []
    for name in arguments.workloads or list(WORKLOADS):
        rows[name] = found = measure(name, with_peers=not arguments.guard)
        for contender, values in found.items():
            ratio = values["seconds"] / found["limit"]["seconds"]
            figures = f"{values['seconds']:10.4f} {ratio:9.2f} {values['start']:8.1f} {values['memory']:7.0f}"
            print(f"{name:15} {contender:14} {figures}", flush=True)
        alone = "bare" if "bare" in found else "limit"
        ratio = found["keel"]["seconds"] / found[alone]["seconds"]
        if ratio > WORKLOADS[name].guard:
            worse.append(f"{name}: {ratio:.2f} of {alone}, above {WORKLOADS[name].guard}")
        if not arguments.guard:
            RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
            plot(rows)
    if arguments.guard and worse:
        raise SystemExit("\n".join(worse))


if __name__ == "__main__":
    main()
