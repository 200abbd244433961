"""Keeps what `keel paper run` gave at desktop scale, and writes docs/reproduction.md from it.

    python tools/reproduction.py keep RUNS [NAME ...]   results/paper from the runs that have ended below RUNS
    python tools/reproduction.py write                  docs/reproduction.md from results/paper and reproduction.toml

Every number of the page comes from results/paper; the words that explain it from reproduction.toml.
"""

import json
import sys
import tomllib
from pathlib import Path

from keel.paper.recipes import find, items
from keel.paper.results import Result, Row, make
from keel.paper.views import drawn, view
from keel.reporting.tables import markdown
from keel.units import size

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "results/paper", ROOT / "docs/reproduction.md"
WORDS = ROOT / "tools/reproduction.toml"
FAMILY = ("ghbm", "localghbm", "fedhbm")
CLASSICAL = ("fedavgm", "fedcm", "fedadc", "mimelitemom")
"""Momentum of the last cohorts alone: FedACG adds a penalty, SCAFFOLD-M and MimeMom control variates."""


def keep(runs: Path, names: list[str]) -> None:
    KEPT.mkdir(exist_ok=True)
    for item in map(find, names or items()):
        result = make(item, "desktop", runs)
        if not any(row["runs"] for part in result.get("parts", []) for row in part["rows"]) and "columns" not in result:
            continue
        (KEPT / f"{item.name}.json").write_text(_text(result), encoding="utf-8")
        figure = view(result).figure
        if figure is not None:
            (KEPT / f"{item.name}.svg").write_bytes(drawn(figure)["figure.svg"])


def write() -> None:
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")}
    lines = [words["head"].strip(), "", "## The paper's three claims", ""]
    for title, claim in (
        ("The GHBM family is ahead of classical momentum at alpha = 0", ahead(results)),
        ("tau near 1/C is best", best_taus(results)),
        ("FedHBM is the cheapest in bytes to FedAvg's quality", cheapest(results)),
    ):
        lines += [f"**{title}.**", "", *(f"- {line}" for line in claim or ["Not yet run at desktop scale."]), ""]
    lines += [words["claims"].strip(), ""]
    for item in items().values():
        lines += [f"## {item.number or 'Not in the paper'}: {item.title} (`{item.name}`)", ""]
        result = results.get(item.name)
        if result is None:
            lines += ["Not yet run at desktop scale.", ""]
            continue
        shown = view(result)
        if result["view"] != "hyperparameters":  # two hundred lines, which keel paper run prints
            for sheet in shown.sheets:
                lines += [markdown(sheet), ""]
        if shown.figure is not None:
            lines += [f"![{item.title}](../results/paper/{item.name}.svg)", ""]
        lines += [f"{note}  " for note in shown.notes]
        lines += ["", f"`{result['command']}` makes it again; [all numbers](../results/paper/{item.name}.json).", ""]
        if item.name in words.get("remarks", {}):
            lines += [words["remarks"][item.name].strip(), ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def ahead(results: dict[str, Result]) -> list[str]:
    """For each setting with alpha = 0 the best of the family beside the best classical momentum, by final accuracy."""
    lines = []
    for title, rows in _settings(results, "controlled-cifar10", "digits", "controlled", "alpha"):
        best = {kind: _best(rows, names) for kind, names in (("family", FAMILY), ("classical", CLASSICAL))}
        if None in best.values():
            continue
        words = [f"{row['label']} {100 * row['accuracy_mean']:.1f} %" for row in best.values() if row]
        lead = 100 * (best["family"]["accuracy_mean"] - best["classical"]["accuracy_mean"])
        lines.append(f"{title}: {words[0]}, the best classical one {words[1]} ({lead:+.1f} points).")
    return lines


def best_taus(results: dict[str, Result]) -> list[str]:
    lines = []
    for part in results.get("tau", {}).get("parts", []):
        rows = [row for row in part["rows"] if "tau=" in row["method"] and row.get("accuracy_mean") is not None]
        if rows:
            ordered = sorted(rows, key=lambda row: -row["accuracy_mean"])
            told = ", ".join(f"{r['label'].split('=')[1]}: {100 * r['accuracy_mean']:.1f} %" for r in rows)
            best = ordered[0]["label"].split("=")[1]
            period = 1 / part["spec"]["participation.rate"]
            lines.append(f"{part['title']}, 1/C = {period:g}: tau = {best} is best ({told}).")
    return lines


def cheapest(results: dict[str, Result]) -> list[str]:
    lines = []
    for part in results.get("cost", {}).get("parts", []):
        rows = [row for row in part["rows"] if row.get("cost") and row["algorithm"] != "fedavg"]
        if rows:
            ordered = sorted(rows, key=lambda row: row["cost"]["bytes"])
            place = next((i for i, row in enumerate(ordered, 1) if row["algorithm"] == "fedhbm"), None)
            first = ordered[0]
            words = f"the cheapest is {first['label']} with {size(first['cost']['bytes'])}"
            if place is not None:
                ours = ordered[place - 1]["cost"]
                words += f"; FedHBM is number {place} of {len(ordered)} with {size(ours['bytes'])}"
                words += f" ({100 * ours['bytes_saved']:.0f} % less than FedAvg)"
            lines.append(f"{part['title']}: {words}.")
    return lines


def _settings(results: dict[str, Result], *names: str) -> list[tuple[str, list[Row]]]:
    """The parts of these results whose clients hold one class each, with their rows."""
    found = []
    for name in names:
        for part in results.get(name, {}).get("parts", []):
            rows = [row for row in part["rows"] if row["values"].get("data.alpha", part["spec"].get("data.alpha")) == 0]
            if rows:
                found.append((f"{part['title']} (`{name}`)", rows))
    return found


def _best(rows: list[Row], algorithms: tuple[str, ...]) -> Row | None:
    known = [row for row in rows if row.get("algorithm") in algorithms and row.get("accuracy_mean") is not None]
    return max(known, key=lambda row: row["accuracy_mean"], default=None)


def _text(result: Result) -> str:
    """JSON in which a row of a part or a panel is a line."""
    above = [name for name in ("parts", "panels") if name in result]
    emptied = {name: [{**each, "rows": []} for each in result[name]] for name in above}
    text = json.dumps({**result, **emptied}, indent=1, ensure_ascii=False)
    for each in (each for name in above for each in result[name]):
        rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in each["rows"])
        text = text.replace('"rows": []', f'"rows": [\n{rows}\n   ]', 1)
    return text + "\n"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["keep", runs, *names]:
            keep(Path(runs), names)
        case ["write"]:
            write()
        case _:
            sys.exit(__doc__)
