"""Keeps what `keel paper run` gave at desktop scale, and writes docs/reproduction.md from it.

    python tools/reproduction.py keep RUNS [NAME ...]   adds to results/paper the runs that have ended below RUNS
    python tools/reproduction.py write                  docs/reproduction.md from results/paper and reproduction.toml

Every number of the page comes from results; the words that explain it, with places for numbers, from reproduction.toml.
"""

import json
import re
import sys
import tomllib
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from keel.paper.recipes import Part, find, items
from keel.paper.results import Result, Row, make
from keel.paper.running import Shelf, fields_of, wanted
from keel.paper.views import drawn, view
from keel.reporting.comparison import Spent, compare, cost
from keel.reporting.tables import accuracy, change, markdown
from keel.runs.folder import RunFolder
from keel.units import size

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "results/paper", ROOT / "docs/reproduction.md"
WORDS = ROOT / "tools/reproduction.toml"
SCARCE = ROOT / "results/digits_scarce.json"
FAMILY = ("ghbm", "localghbm", "fedhbm")
MOMENTUM = ("fedavgm", "fedacg", "scaffold_m", "fedcm", "fedadc", "mimemom", "mimelitemom")
"""The others that the paper lists as momentum-based."""


def keep(runs: Path, names: list[str]) -> None:
    KEPT.mkdir(exist_ok=True)
    shelf = Shelf(runs)
    for item in map(find, names or items()):
        result = _without_times(make(item, "desktop", shelf))
        before = KEPT / f"{item.name}.json"
        if "parts" in result and before.exists():
            parts = {part["title"]: part for part in json.loads(before.read_text(encoding="utf-8"))["parts"]}
            pairs = zip(result["parts"], item.parts("desktop"), strict=True)
            result["parts"] = [_joined(made, parts.get(made["title"]), part, shelf) for made, part in pairs]
        if not any(row["runs"] for part in result.get("parts", []) for row in part["rows"]) and "columns" not in result:
            continue
        (KEPT / f"{item.name}.json").write_text(_text(result), encoding="utf-8")
        shown = view(result)
        if shown.figure is not None:
            (KEPT / f"{item.name}.svg").write_bytes(drawn(shown.figure)["figure.svg"])


def _joined(made: Row, kept: Row | None, part: Part, shelf: Shelf) -> Row:
    """A part in which methods that have more runs among those kept before stay as they were."""
    if kept is None:
        return made
    before = {_key(row): row for row in kept["rows"]}
    rows, own = [], set[str]()
    for row in made["rows"]:
        old, full = before.get(_key(row)), {**made["spec"], **row["settings"]}
        if old is not None and old["runs"] > row["runs"]:
            searched = old.get("chosen", {})
            was = {**kept["spec"], **old["settings"]}
            if {**full, **searched} != was:
                changed = sorted(name for name in full | was if {**full, **searched}.get(name) != was.get(name))
                raise SystemExit(f"{made['title']}: {row['label']} was kept with other {', '.join(changed)}")
            row, full = old, was
        elif row["runs"]:
            own.add(_key(row))
        rows.append({**row, "settings": full})
    baseline = next((row for row in rows if row["method"] == "fedavg" and "cost" in row), None)
    for number, row in enumerate(rows):
        if baseline is not None and _key(row) in own and "cost" not in row:
            rows[number] = row | _priced(_ended(part, row, shelf), baseline)
    first = rows[0]["settings"]
    common = {name: told for name, told in first.items() if all(row["settings"].get(name) == told for row in rows)}
    for row in rows:
        row["settings"] = {name: value for name, value in row["settings"].items() if name not in common}
    environments = {repr(each): each for each in (*kept["environments"], *made["environments"])}
    return {**made, "spec": common, "environments": list(environments.values()), "rows": rows}


def _ended(part: Part, row: Row, shelf: Shelf) -> list[RunFolder]:
    """A row's runs that have ended."""
    specs = wanted(part, shelf).specs[row["method"]]
    own = [spec for spec in specs if row["values"].items() <= fields_of(spec).items()]
    return [folder for spec in own if (folder := shelf.find(spec)) and folder.ended]


def _key(row: Row) -> str:
    return repr((row["method"], row["values"]))


def _priced(folders: list[RunFolder], baseline: Row) -> Row:
    """What runs cost beside a baseline of which only the numbers are kept."""
    compared = compare(folders, target=baseline["target"])
    [method], [row] = compared.methods, compared.rows()
    reached, whole = row["rounds_to_target"], Spent(method.budget.rounds, round(baseline["cost"]["bytes"]), 0.0)
    saved = {}
    if reached:
        saved["rounds_saved"] = 1 - reached / baseline["rounds_to_target"]
        saved["bytes_saved"] = 1 - row["bytes_to_target"] / baseline["bytes_to_target"]
    times = {"seconds": None, "seconds_saved": None}
    told = {name: row[name] for name in ("target", "rounds_to_target", "rounds_to_target_seeds", "bytes_to_target")}
    return {**told, **saved, "cost": asdict(cost(reached, method.budget, whole)) | times}


def _without_times(result: Result) -> Result:
    """The machine that made the runs did other work besides, more of it during some of them than during others."""
    for part in result.get("parts", []):
        for row in part["rows"]:
            if "cost" in row:
                row["cost"] |= {"seconds": None, "seconds_saved": None}
            row.pop("seconds_to_target", None)
    return result


def write() -> None:
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")}
    known = facts(results)
    lines = [words["head"].strip(), "", "## The paper's three claims", ""]
    for title, claim in (
        ("The GHBM family is ahead of classical momentum at alpha = 0", ahead(results)),
        ("tau near 1/C is best", best_taus(results)),
        ("FedHBM is the cheapest in bytes to FedAvg's quality", cheapest(results)),
    ):
        lines += [f"**{title}.**", "", *(f"- {line}" for line in claim or ["Not yet run at desktop scale."]), ""]
    lines += [filled(words["claims"], known), "", "## At a glance", "", *glance(results, words.get("verdicts", {})), ""]
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
            lines += [filled(words["remarks"][item.name], known), ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def glance(results: dict[str, Result], verdicts: dict[str, str]) -> list[str]:
    """A line for each table and figure: what it was made of here, and whether it agrees."""
    lines = ["| | in the paper | made here of | agrees with the paper |", "|---|---|---|---|"]
    for item in items().values():
        begun = [part["title"] for part in _parts(results, item.name) if any(row["runs"] for row in part["rows"])]
        verdict = verdicts.get(item.name, "not run yet" if item.name not in results else "-")
        lines.append(f"| `{item.name}` | {item.number or '-'} | {'; '.join(begun) or '-'} | {verdict} |")
    return lines


def ahead(results: dict[str, Result]) -> list[str]:
    """For each setting with alpha = 0 the best of the family beside the best other momentum, by final accuracy; for
    MNIST by writer too, where the data differ less.
    """
    lines = []
    alike = _settings(results, "controlled-cifar10", "digits", "tau", "controlled")
    by_writer = [(f"{part['title']}, not alpha = 0 (`mnist`)", part["rows"]) for part in _parts(results, "mnist")[:1]]
    for title, rows in [*alike, *by_writer]:
        ours, theirs = _best(rows, FAMILY), _best(rows, MOMENTUM)
        if ours is None or theirs is None:
            continue
        lead = ours["accuracy_mean"] - theirs["accuracy_mean"]
        run = sum(row.get("algorithm") in MOMENTUM and row.get("accuracy_mean") is not None for row in rows)
        words = f"{_told(ours)}, the best of {run} other momentum method{'s' * (run > 1)} {_told(theirs)}: "
        words += f"{100 * lead:+.1f} points"
        spread = max(row["accuracy_std"] or 0.0 for row in (ours, theirs))
        seen = "one seed, no deviation" if spread == 0 else "not visible, within the deviation"
        lines.append(f"{title}: {words}{f' ({seen})' if abs(lead) <= spread or spread == 0 else ''}.")
    return lines


def best_taus(results: dict[str, Result]) -> list[str]:
    lines = []
    for part in _parts(results, "tau"):
        rows = {_tau(row): row for row in part["rows"] if _tau(row) and row.get("accuracy_mean") is not None}
        if rows:
            best = max(rows, key=lambda tau: rows[tau]["accuracy_mean"])
            least = rows[best]["accuracy_mean"] - (rows[best]["accuracy_std"] or 0.0)
            near = [tau for tau, row in rows.items() if tau != best and row["accuracy_mean"] >= least]
            within = f", {' and '.join(near)} within its deviation" if near else ""
            told = ", ".join(f"{tau}: {accuracy(row)}" for tau, row in rows.items())
            unsearched = [tau for tau, row in rows.items() if part["grid"] and "chosen" not in row]
            period = 1 / part["spec"]["participation.rate"]
            rate = f"; not yet at a local rate of its own: {', '.join(unsearched)}" if unsearched else ""
            lines.append(f"{part['title']}, 1/C = {period:g}: tau = {best} is highest{within} ({told}){rate}.")
    return lines


def _tau(row: Row) -> str | None:
    """The tau that a method's own fields set."""
    own = dict(field.split("=") for field in row["method"].split()[1:])
    return own.get("algorithm.tau")


def _told(row: Row) -> str:
    return f"{row['label']} {accuracy(row)}"


def cheapest(results: dict[str, Result]) -> list[str]:
    lines = []
    for part in _parts(results, "cost"):  # by Table 4's rule, by which FedAvg pays for all its rounds
        rows = [row for row in part["rows"] if row.get("cost") and row["algorithm"] != "fedavg"]
        if rows:
            least = min(row["cost"]["bytes"] for row in rows)  # by the curve averaged over the seeds
            firsts = [row for row in rows if row["cost"]["bytes"] == least]
            words = f"the cheapest of {1 + len(rows)} is {', like '.join(map(_spent, firsts))}"
            for ours in (row for row in rows if row["algorithm"] == "fedhbm" and row not in firsts):
                cheaper = sum(row["cost"]["bytes"] < ours["cost"]["bytes"] for row in rows)
                words += f"; {cheaper} are cheaper than {_spent(ours)}"
            lines.append(f"{part['title']}: {words}.")
    return lines


def _spent(row: Row) -> str:
    seeds = [rounds for rounds in row["rounds_to_target_seeds"] if rounds is not None]
    each = f", its seeds each after {min(seeds)} to {max(seeds)}" if len(seeds) > 1 else ""
    reached = f", after {row['rounds_to_target']} rounds{each}" if row["rounds_to_target"] else ", never there"
    return (
        f"{row['label']}: {size(row['cost']['bytes'])} ({change(row['cost']['bytes_saved'])} against FedAvg{reached})"
    )


def facts(results: dict[str, Result]) -> dict[str, str]:
    """The numbers that remarks may name: {digits.0.fedhbm} is FedHBM's accuracy in the first part of digits."""
    found = {}
    for name, result in results.items():
        for number, part in enumerate(result.get("parts", [])):
            for row in part["rows"]:
                if row.get("accuracy_mean") is not None:
                    method = " ".join([row["method"], *map(str, row["values"].values())])
                    found[f"{name}.{number}.{method}"] = accuracy(row)
                if "curve" in row:
                    means = row["curve"]["mean"]
                    most = max(abs(after - before) for before, after in pairwise(means))
                    found[f"{name}.{number}.{row['method']} swing"] = f"{100 * most:.1f}"
                for tau, told in row.get("deviation", {}).items():
                    found[f"{name}.{number}.tau={tau}"] = f"{told['second_half']:.2f}"
    for method, *losses in results.get("regression", {}).get("rows", []):
        found |= {f"regression.{number}.{method}": loss for number, loss in enumerate(losses)}
    for row in json.loads(SCARCE.read_text(encoding="utf-8")):
        found[f"scarce.{row['algorithm']}"] = accuracy(row)
    return found


def filled(text: str, known: dict[str, str]) -> str:
    """The words with their numbers."""
    return re.sub(r"\{([^}]+)\}", lambda name: known[name[1]], text.strip())


def _settings(results: dict[str, Result], *names: str) -> list[tuple[str, list[Row]]]:
    """The parts of these results whose clients hold one class each, with their rows; of those of a task the first.

    Of several tau only 1/C, which is what the paper proposes: the best of them on the test examples would be picked.
    """
    found: dict[tuple[str, str], tuple[str, list[Row]]] = {}
    for name in names:
        for part in _parts(results, name):
            rows = [row for row in part["rows"] if row["values"].get("data.alpha", part["spec"].get("data.alpha")) == 0]
            period = f"{1 / part['spec'].get('participation.rate', 1):g}"
            rows = [row for row in rows if _tau(row) in (None, period)]
            if rows:
                task = part["spec"].get("data.name", ""), part["spec"].get("model.name", "")
                rates = ", at the paper's rates" if part.get("printed") else ""
                found.setdefault(task, (f"{part['title']}{rates} (`{name}`)", rows))
    return list(found.values())


def _parts(results: dict[str, Result], name: str) -> list[Row]:
    return results.get(name, {}).get("parts", [])


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
