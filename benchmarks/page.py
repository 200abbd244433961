"""Writes the tables and the plot of docs/performance.md from results/performance.json.

python benchmarks/page.py
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import altair
from workloads import COUNTS, WORKLOADS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "performance.json"
DEVICE_RESULTS = ROOT / "results" / "performance_device.json"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.svg"
TABLE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
PEERS = {
    "pfl": "pfl, one process",
    "pfl-processes": "pfl, one process per core",
    "flower": "Flower",
    "flower-legacy": "Flower, legacy",
}
OTHERS = {**PEERS, "naive": "plain loop"}
TITLES = {
    "digits": "digits: MLP 64-64-10, 10 clients x 8 steps of 8",
    "many": "many: the same, 100 of 1,000 clients",
    "layernorm": "the MLP with LayerNorm and GELU",
    "cnn": "CNN of two convolutions on 8x8 images, 10 clients x 8 steps of 8",
    "transformer": "transformer of two layers on 16 tokens, 10 clients x 8 steps of 16",
    "lenet": "LeNet, 10 clients x 8 steps of 64",
    "resnet20": "ResNet-20, the same",
    "shakespeare": "Shakespeare's LSTM, 10 clients x 20 steps of 100",
}
Row = dict[str, Any]
"""The measurements of a workload: the medians of each contender, and the seconds of each repetition ("turns")."""


def ratio(row: Row, one: str, other: str) -> float:
    return row[one]["seconds"] / row[other]["seconds"]


def tables(rows: dict[str, Row]) -> dict[str, str]:
    timed = [name for name in WORKLOADS if name in rows]
    measured = [other for other in OTHERS if any(other in rows[name] for name in timed)]
    names = {"class": "Keel", "compiled": "Keel, compiled", **PEERS}
    needed = [contender for contender in names if any(contender in rows[name] for name in timed)]
    clients = [
        "clients, 10 per round",
        "ms per round",
        "relative to 1,000 clients",
        "start-up",
        "peak memory",
        "memory at the end",
    ]
    return {
        "times": _table(
            ["time per round", "Keel", "limit", "best other", "Keel relative to the limit", "to the best other"],
            (_times(name, rows[name]) for name in timed),
        ),
        "serial": _table(
            ["processor time per round", "`serial`", "plain loop, one thread", "ratio"],
            (_processor(name, rows[name]) for name in timed if "serial" in rows[name]),
        ),
        "peers": _table(
            ["time per round", *(OTHERS[other] for other in measured)],
            ([name, *_others(rows[name], measured)] for name in timed),
        ),
        "own": _table(["workload", "time of", "relative to", "ratio"], _own(rows)),
        "needs": _table(
            ["peak memory, start-up", *(names[contender] for contender in needed)],
            ([name, *_needs(rows[name], needed)] for name in timed),
        ),
        "clients": _table(clients, _counts(rows["clients"])),
        "device": _device(),
    }


def _device() -> str:
    """The table of an accelerator; a sentence as long as nobody has measured one."""
    if not DEVICE_RESULTS.exists():
        return "Not measured yet.\n"
    measured = json.loads(DEVICE_RESULTS.read_text())
    lines = (
        [name, _seconds(row["class"]), _seconds(row["one"]), _spread(row, "class", "one")]
        for name, row in measured["rows"].items()
    )
    return _table([f"time per round on {measured['device']}", "Keel", "plain loop", "ratio"], lines)


def _times(name: str, row: Row) -> list[str]:
    best = min((other for other in OTHERS if other in row), key=lambda other: row[other]["seconds"])
    return [
        TITLES[name],
        _seconds(row["class"]),
        _seconds(row["limit"]),
        f"{_seconds(row[best])} ({OTHERS[best]})",
        _spread(row, "class", "limit"),
        _spread(row, "class", best),
    ]


def _processor(name: str, row: Row) -> list[str]:
    one, other = row["serial"]["processor"], row["one"]["processor"]
    return [name, f"{one:.4f} s", f"{other:.4f} s", f"**{one / other:.2f}**"]


def _others(row: Row, names: list[str]) -> list[str]:
    return [_seconds(row[name]) if name in row else "" for name in names]


def _own(rows: dict[str, Row]) -> Iterable[list[str]]:
    pairs = [
        ("stateful", "FedHBM", "FedAvg", "fedhbm", "keel"),
        ("stateful", "SCAFFOLD", "FedAvg", "scaffold", "keel"),
        *((name, "Keel, compiled", "Keel", "compiled", "class") for name in ("digits", "many", "layernorm", "cnn")),
        *((name, "the built-in model", "the user's class", "keel", "class") for name in WORKLOADS),
    ]
    pairs = [pair for pair in pairs if pair[0] in rows and {pair[3], pair[4]} <= rows[pair[0]].keys()]
    for name, one, other, *pair in pairs:
        yield ["lenet" if name == "stateful" else name, one, other, _spread(rows[name], *pair)]


def _needs(row: Row, names: list[str]) -> list[str]:
    return [f"{row[name]['memory']:,.0f} MB, {row[name]['start']:.1f} s" if name in row else "" for name in names]


def _counts(row: Row) -> Iterable[list[str]]:
    for name, count in COUNTS.items():
        measured = row[name]
        yield [
            f"{count:,}",
            f"{1000 * measured['seconds']:.2f}",
            _spread(row, name, "n=1,000"),
            f"{measured['start']:.2f} s",
            f"{measured['memory']:.0f} MB",
            f"{measured['rest']:.0f} MB",
        ]


def _seconds(measured: dict[str, Any]) -> str:
    return f"{measured['seconds']:.4f} s" if measured["seconds"] < 1 else f"{measured['seconds']:.2f} s"


def _spread(row: Row, one: str, other: str) -> str:
    """The ratio of the medians, and the range of the ratios within each repetition."""
    ratios = [a / b for a, b in zip(row[one]["turns"], row[other]["turns"], strict=True)]
    return f"**{ratio(row, one, other):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def _table(header: list[str], lines: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *lines])


def plot(rows: dict[str, Row]) -> None:
    """Plot each contender's time per round relative to the limit."""
    names = {"class": "Keel", **OTHERS}
    points = [
        {"workload": name, "contender": names[contender], "relative": ratio(row, contender, "limit")}
        for name, row in rows.items()
        for contender in row
        if "limit" in row and contender in names
    ]
    measured = {point["contender"] for point in points}
    domain = [name for name in names.values() if name in measured]
    legend = altair.Legend(title=None, labelLimit=240)
    base = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X("relative:Q", scale=altair.Scale(type="log"), title="time per round relative to the limit"),
        y=altair.Y("workload:N", sort=list(WORKLOADS), title=None),
        color=altair.Color("contender:N", scale=altair.Scale(domain=domain, scheme="tableau10"), legend=legend),
        shape=altair.Shape("contender:N", scale=altair.Scale(domain=domain), legend=legend),
    )
    base.mark_point(size=90, filled=True).properties(width=520, height=260, padding=15).save(str(PLOT))


def filled(page: str, rows: dict[str, Row]) -> str:
    """The page with each table written between its two comments."""
    by_name = tables(rows)
    return TABLE.sub(lambda match: f"{match[1]}\n{by_name[match[2]]}\n{match[3]}", page)


def write() -> None:
    rows = json.loads(RESULTS.read_text())
    PAGE.write_text(filled(PAGE.read_text(), rows))
    plot(rows)


if __name__ == "__main__":
    write()
