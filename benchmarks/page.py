"""The plot of docs/performance.md and its tables, from results/performance.json.

python benchmarks/page.py                    # writes both again
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
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.svg"
PLACE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
PEERS = {
    "pfl": "pfl, one process",
    "pfl-processes": "pfl, a process per core",
    "flower": "Flower",
    "flower-legacy": "Flower, legacy",
}
OTHERS = {**PEERS, "naive": "plain loop"}
TITLES = {
    "digits": "digits: MLP 64-64-10, 10 clients x 8 steps of 8",
    "many": "many: the same, 100 of 1,000 clients",
    "lenet": "LeNet, 10 clients x 8 steps of 64",
    "resnet20": "ResNet-20, the same",
    "shakespeare": "Shakespeare's LSTM, 10 clients x 20 steps of 100",
}
Row = dict[str, Any]
"""Of each contender the medians, and the seconds of each turn."""


def ratio(row: Row, one: str, other: str) -> float:
    return row[one]["seconds"] / row[other]["seconds"]


def tables(rows: dict[str, Row]) -> dict[str, str]:
    timed = [name for name in WORKLOADS if name in rows]
    clients = ["clients, 10 in a round", "ms a round", "of a thousand's", "start-up", "MB at the peak", "MB after it"]
    return {
        "times": _table(
            ["seconds a round", "Keel", "limit", "best other", "of the limit", "of the best other"],
            (_against(name, rows[name]) for name in timed),
        ),
        "peers": _table(["seconds a round", *OTHERS.values()], ([name, *_others(rows[name])] for name in timed)),
        "own": _table(["workload", "time of", "over that of", "ratio"], _own(rows)),
        "needs": _table(
            ["memory, start-up", "Keel", "Keel, compiled", *PEERS.values()],
            ([name, *_needs(rows[name])] for name in timed),
        ),
        "clients": _table(clients, _counts(rows["clients"])),
    }


def _against(name: str, row: Row) -> list[str]:
    best = min((other for other in OTHERS if other in row), key=lambda other: row[other]["seconds"])
    return [
        TITLES[name],
        _seconds(row["keel"]),
        _seconds(row["limit"]),
        f"{_seconds(row[best])} ({OTHERS[best]})",
        _spread(row, "keel", "limit"),
        _spread(row, "keel", best),
    ]


def _others(row: Row) -> list[str]:
    return [_seconds(row[name]) if name in row else "" for name in OTHERS]


def _own(rows: dict[str, Row]) -> Iterable[list[str]]:
    asked = [
        ("stateful", "FedHBM in Keel", "FedAvg in Keel", "fedhbm", "keel"),
        ("stateful", "SCAFFOLD in Keel", "FedAvg in Keel", "scaffold", "keel"),
        ("digits", "Keel, compiled", "Keel", "compiled", "keel"),
        ("many", "Keel, compiled", "Keel", "compiled", "keel"),
        *(
            line
            for name in ("lenet", "resnet20")
            for line in (
                (name, "Keel", "its steps alone", "keel", "bare"),
                (name, "Keel's steps alone", "the limit", "bare", "limit"),
                (name, "Keel with the published model", "the limit", "published", "limit"),
                (name, "Keel with the published model", "Keel", "published", "keel"),
            )
        ),
    ]
    for name, one, other, *pair in asked:
        yield ["lenet" if name == "stateful" else name, one, other, _spread(rows[name], *pair)]


def _needs(row: Row) -> list[str]:
    names = ("keel", "compiled", *PEERS)
    return [f"{row[name]['memory']:,.0f} MB, {row[name]['start']:.1f} s" if name in row else "" for name in names]


def _counts(row: Row) -> Iterable[list[str]]:
    for name, count in COUNTS.items():
        found = row[name]
        yield [
            f"{count:,}",
            f"{1000 * found['seconds']:.2f}",
            _spread(row, name, "n=1,000"),
            f"{found['start']:.2f} s",
            f"{found['memory']:.0f}",
            f"{found['rest']:.0f}",
        ]


def _seconds(found: dict[str, Any]) -> str:
    return f"{found['seconds']:.4f} s" if found["seconds"] < 1 else f"{found['seconds']:.2f} s"


def _spread(row: Row, one: str, other: str) -> str:
    """The ratio of the medians, and the least and the largest of the turns: one of each, one after the other."""
    turns = [a / b for a, b in zip(row[one]["turns"], row[other]["turns"], strict=True)]
    return f"**{ratio(row, one, other):.2f}** ({min(turns):.2f} to {max(turns):.2f})"


def _table(heads: list[str], lines: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [heads, ["---"] * len(heads), *lines])


def plot(rows: dict[str, Row]) -> None:
    """Each contender's time as a multiple of the limit."""
    names = {"keel": "Keel", **OTHERS}
    points = [
        {"workload": name, "contender": names[contender], "of the limit": ratio(row, contender, "limit")}
        for name, row in rows.items()
        for contender in row
        if "limit" in row and contender in names
    ]
    told, legend = list(names.values()), altair.Legend(title=None, labelLimit=240)
    base = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X("of the limit:Q", scale=altair.Scale(type="log"), title="round time, as a multiple of the limit"),
        y=altair.Y("workload:N", sort=list(WORKLOADS), title=None),
        color=altair.Color("contender:N", scale=altair.Scale(domain=told, scheme="tableau10"), legend=legend),
        shape=altair.Shape("contender:N", scale=altair.Scale(domain=told), legend=legend),
    )
    base.mark_point(size=90, filled=True).properties(width=520, height=180, padding=15).save(str(PLOT))


def filled(page: str, rows: dict[str, Row]) -> str:
    """The page with each table in its place."""
    made = tables(rows)
    return PLACE.sub(lambda place: f"{place[1]}\n{made[place[2]]}\n{place[3]}", page)


def write() -> None:
    rows = json.loads(RESULTS.read_text())
    PAGE.write_text(filled(PAGE.read_text(), rows))
    plot(rows)


if __name__ == "__main__":
    write()
