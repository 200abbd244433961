"""Store the results of `keel paper run` at desktop scale, and write docs/reproduction.md from them.

    python tools/reproduction.py keep RUNS [NAME ...]   add the finished runs below RUNS to results/paper
    python tools/reproduction.py write                  write docs/reproduction.md

Every number on the page comes from results/; the text with its placeholders comes from reproduction.toml.
"""

import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

from reproduction_numbers import fill, numbers

from keel.paper.claims import THEOREM, THEOREM_RULE, all_claims, better_methods, theorem_summary
from keel.paper.evidence import RULES
from keel.paper.execution import plan_runs
from keel.paper.files import svg
from keel.paper.probe import is_older, probe
from keel.paper.recipes import Part, Recipe, all_recipes, find_recipe
from keel.paper.reported import copy_searches, default_of
from keel.paper.results import Result, Row, fields_of, make_result
from keel.paper.run_index import RunIndex, spec_fields
from keel.paper.views import make_view
from keel.report.comparison import compare
from keel.report.tables import Sheet, markdown
from keel.report.target import Spent, cost
from keel.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results/paper", ROOT / "docs/reproduction.md"
TEXTS = ROOT / "tools/reproduction.toml"
NOT_RUN = "Not run yet at desktop scale."
OLDER = """
**{count} of {rows} rows are of an older version of the code**, which computed something else or stored no fingerprint
of what it computed (src/keel/paper/probe.py). They are marked ‡ and are to be run again.
"""
CLAIM_COLUMNS = ["claim", "verdict", "effect (95 % interval)", "tasks", "seeds", "runs"]
TASK_COLUMNS = ["task", "compared", "difference (95 % interval)", "corrected p", "result"]
BETTER_COLUMNS = ["task", "method", "best of the GHBM family", "difference (95 % interval)", "corrected p"]
BETTER = """
Methods whose paired difference from the most accurate of GHBM, LocalGHBM and FedHBM is above zero (t test over seeds, p
corrected by Holm's procedure for the methods of the task). The member of the family is selected by the reported seeds,
which favours the family.
"""


def keep(runs: Path, names: list[str]) -> None:
    """Add the finished runs below `runs` to the stored results; stored rows with more runs stay."""
    RESULTS.mkdir(exist_ok=True)
    copy_searches(runs, RESULTS)
    copy_searches(RESULTS, runs)
    index = RunIndex(runs)
    for recipe in map(find_recipe, names or all_recipes()):
        result = _without_times(make_result(recipe, "desktop", index))
        path = RESULTS / f"{recipe.name}.json"
        if "parts" in result:
            parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else []
            stored = {part["title"]: part for part in parts}
            for new in result["parts"]:
                _add_probes(new, stored.get(new["title"]))
            pairs = zip(result["parts"], recipe.parts("desktop"), strict=True)
            result["parts"] = [_merge(new, stored.get(new["title"]), part, index) for new, part in pairs]
        if "columns" not in result and not any(row["runs"] for part in result["parts"] for row in part["rows"]):
            continue
        path.write_text(to_json(result), encoding="utf-8")
        view = make_view(result)
        if view.figure is not None:
            path.with_suffix(".svg").write_bytes(svg(view.figure))


def _merge(new: Row, stored: Row | None, part: Part, index: RunIndex) -> Row:
    """Return the new part, with the stored row of each method that had more runs of the same settings."""
    if stored is None:
        return new
    before = {_key(row): row for row in stored["rows"]}
    rows, updated = [], set[str]()
    for row in new["rows"]:
        old, settings = before.get(_key(row)), fields_of(new, row)
        if old is not None and old["runs"] > row["runs"] and not _changed(new, row, stored, old):
            row, settings = old | _search_fields(row), fields_of(stored, old)
        elif row["runs"]:
            updated.add(_key(row))
        rows.append({**row, "settings": settings})
    baseline = next((row for row in rows if row["method"] == "fedavg" and "cost" in row), None)
    if baseline is not None:
        rows = [
            row | _cost_fields(_finished(part, row, index), baseline)
            if _key(row) in updated and "cost" not in row
            else row
            for row in rows
        ]
    first = rows[0]["settings"]
    common = {name: value for name, value in first.items() if all(row["settings"].get(name) == value for row in rows)}
    for row in rows:
        row["settings"] = {name: value for name, value in row["settings"].items() if name not in common}
    environments = {repr(each): each for each in (*stored["environments"], *new["environments"])}
    return {**new, "spec": common, "environments": list(environments.values()), "rows": rows}


def _search_fields(row: Row) -> Row:
    """Return what a row says of a search that has ended."""
    names = ("chosen", "trials", "search_score", "open_fields") if "chosen" in row else ()
    return {name: row[name] for name in names}


def _changed(new: Row, row: Row, stored: Row, old: Row) -> list[str]:
    """Return the fields in which the recipe has changed since a row was stored, and print them."""
    chosen = {} if "chosen" in row else old.get("chosen", {})
    expected, settings = {**fields_of(new, row), **chosen}, fields_of(stored, old)
    fields = sorted(name for name in expected | settings if expected.get(name) != settings.get(name, default_of(name)))
    if chosen and stored["tuned"] != new["tuned"]:
        fields.append("search")
    if fields:
        print(f"{new['title']}: dropped the stored {row['label']}, which has a different {', '.join(fields)}")
    return fields


def _add_probes(new: Row, stored: Row | None) -> None:
    """Add a probe to each row with runs: that of today's code, unless the same runs were stored with theirs."""
    before = {_key(row): row for row in stored["rows"]} if stored else {}
    for row in new["rows"]:
        old = before.get(_key(row), {})
        if row["runs"]:
            same = "probe" in old and old.get("accuracy_seeds") == row.get("accuracy_seeds")
            row["probe"] = old["probe"] if same else probe(fields_of(new, row))


def _finished(part: Part, row: Row, index: RunIndex) -> list[RunFolder]:
    """Return the finished runs of a row."""
    specs = plan_runs(part, index).specs[row["method"]]
    return index.finished(spec for spec in specs if row["values"].items() <= spec_fields(spec).items())


def _key(row: Row) -> str:
    return repr((row["method"], row["values"]))


def _cost_fields(folders: list[RunFolder], baseline: Row) -> Row:
    """Return the cost of runs relative to a baseline of which only the stored numbers remain."""
    comparison = compare(folders, target=baseline["target"])
    [method], [row] = comparison.methods, comparison.rows()
    reached, total = row["rounds_to_target"], Spent(method.budget.rounds, round(baseline["cost"]["bytes"]), 0.0)
    saved = {}
    if reached:
        saved["rounds_saved"] = 1 - reached / baseline["rounds_to_target"]
        saved["bytes_saved"] = 1 - row["bytes_to_target"] / baseline["bytes_to_target"]
    fields = {name: row[name] for name in ("target", "rounds_to_target", "rounds_to_target_seeds", "bytes_to_target")}
    times = {"seconds": None, "seconds_saved": None}
    return {**fields, **saved, "cost": asdict(cost(method.reaches(baseline["target"]), method.budget, total)) | times}


def _without_times(result: Result) -> Result:
    """Return the result without wall-clock times: the machine did other work during some of the runs."""
    for part in result.get("parts", []):
        for row in part["rows"]:
            if "cost" in row:
                row["cost"] |= {"seconds": None, "seconds_saved": None}
            row.pop("seconds_to_target", None)
    return result


def write() -> None:
    """Write the page from the stored results and the texts."""
    texts = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    values = numbers(results)
    lines = [texts["head"].strip(), "", *_mark_older(results), *_claims(results)]
    lines += ["## Overview", "", *_overview(results, texts.get("verdicts", {})), ""]
    remarks = texts.get("remarks", {})
    for recipe in all_recipes().values():
        lines += [f"## {recipe.number or 'Not in the paper'}: {recipe.title} (`{recipe.name}`)", ""]
        lines += _section(recipe, results[recipe.name]) if recipe.name in results else [NOT_RUN, ""]
        if recipe.name in results and recipe.name in remarks:
            lines += [fill(remarks[recipe.name], values), ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _mark_older(results: dict[str, Result]) -> list[str]:
    """Mark the rows that older code measured, and return a paragraph with their number."""
    rows = [(part, row) for result in results.values() for part in result.get("parts", []) for row in part["rows"]]
    finished = [(part, row) for part, row in rows if row["runs"]]
    for part, row in finished:
        row["older"] = is_older(row.get("probe"), fields_of(part, row))
    count = sum(row["older"] for _, row in finished)
    return [OLDER.strip().format(count=count, rows=len(finished)), ""] if count else []


def _claims(results: dict[str, Result]) -> list[str]:
    """Return the table of the claims, the rule of the verdicts, and the evidence of each claim."""
    claims = all_claims(results)
    rows = [[claim.title, *claim.summary(), _links(claim.sources)] for claim in claims]
    theorem = results.get("theorem", {})
    rows.append([THEOREM, *theorem_summary(theorem), _links(["theorem"] if theorem else [])])
    lines = ["## The paper's claims", "", _table(CLAIM_COLUMNS, rows), "", RULES.strip(), "", THEOREM_RULE, ""]
    for claim in claims:
        if claim.questions:
            lines += [f"### {claim.title}", "", claim.test, "", _table(TASK_COLUMNS, claim.lines()), ""]
    lines += ["### Where another method is better than the GHBM family", "", BETTER.strip(), ""]
    better = better_methods(results)
    return [*lines, _table(BETTER_COLUMNS, better) if better else "On no task.", ""]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return markdown(Sheet("", columns, rows, {})).replace("---:", "---")


def _links(sources: list[str]) -> str:
    return ", ".join(f"[{name}](../results/paper/{name}.json)" for name in sources) or "-"


def _section(recipe: Recipe, result: Result) -> list[str]:
    """Return the tables, the figure and the notes of a result."""
    view, lines = make_view(result), []
    if result["view"] != "hyperparameters":  # two hundred lines; keel paper run prints them
        for sheet in view.sheets:
            lines += [markdown(sheet), ""]
    if view.figure is not None:
        lines += [f"![{recipe.title}](../results/paper/{recipe.name}.svg)", ""]
    lines += [*(f"{note}  " for note in view.notes), *([""] if view.notes else [])]
    return [*lines, f"Reproduce: `{result['command']}`; [all numbers](../results/paper/{recipe.name}.json).", ""]


def _overview(results: dict[str, Result], verdicts: dict[str, str]) -> list[str]:
    """Return a table with a line per recipe: the settings that were run, and the verdict."""
    lines = ["| | in the paper | run here | agrees with the paper |", "|---|---|---|---|"]
    for recipe in all_recipes().values():
        parts = results.get(recipe.name, {}).get("parts", [])
        started = [part["title"] for part in parts if any(row["runs"] for row in part["rows"])]
        verdict = verdicts.get(recipe.name, "-" if recipe.name in results else "not run yet")
        lines.append(f"| `{recipe.name}` | {recipe.number or '-'} | {'; '.join(started) or '-'} | {verdict} |")
    return lines


def to_json(result: Result) -> str:
    """Return JSON in which each row of a part or a panel is one line."""
    lists = [name for name in ("parts", "panels") if name in result]
    without_rows = {name: [{**each, "rows": []} for each in result[name]] for name in lists}
    text = json.dumps({**result, **without_rows}, indent=1, ensure_ascii=False)
    for each in (each for name in lists for each in result[name]):
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
