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
from typing import Any

from reproduction_claims import best_tau, cheapest, fill, lead, numbers

from keel.config.schema import Spec
from keel.paper.execution import plan_runs
from keel.paper.files import svg
from keel.paper.recipes import Part, Recipe, all_recipes, find_recipe
from keel.paper.results import Result, Row, make_result
from keel.paper.run_index import RunIndex, spec_fields
from keel.paper.views import make_view
from keel.report.comparison import compare
from keel.report.tables import markdown
from keel.report.target import Spent, cost
from keel.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results/paper", ROOT / "docs/reproduction.md"
TEXTS = ROOT / "tools/reproduction.toml"
NOT_RUN = "Not run yet at desktop scale."
CLAIMS = {
    "At alpha = 0, the GHBM family is more accurate than classical momentum": lead,
    "tau near 1/C is best": best_tau,
    "FedHBM reaches FedAvg's accuracy with the fewest bytes": cheapest,
}


def keep(runs: Path, names: list[str]) -> None:
    """Add the finished runs below `runs` to the stored results; stored rows with more runs stay."""
    RESULTS.mkdir(exist_ok=True)
    index = RunIndex(runs)
    for recipe in map(find_recipe, names or all_recipes()):
        result = _without_times(make_result(recipe, "desktop", index))
        path = RESULTS / f"{recipe.name}.json"
        if "parts" in result and path.exists():
            stored = {part["title"]: part for part in json.loads(path.read_text(encoding="utf-8"))["parts"]}
            pairs = zip(result["parts"], recipe.parts("desktop"), strict=True)
            result["parts"] = [_merge(new, stored.get(new["title"]), part, index) for new, part in pairs]
        if "columns" not in result and not any(row["runs"] for part in result["parts"] for row in part["rows"]):
            continue
        path.write_text(to_json(result), encoding="utf-8")
        view = make_view(result)
        if view.figure is not None:
            path.with_suffix(".svg").write_bytes(svg(view.figure))


def _default(name: str) -> Any:
    """Return the default of a field, which results have that were stored before the field existed."""
    table, _, field = name.partition(".")
    fields = getattr(Spec.model_fields[table].annotation, "model_fields", {}) if table in Spec.model_fields else {}
    return fields[field].default if field in fields else None


def _merge(new: Row, stored: Row | None, part: Part, index: RunIndex) -> Row:
    """Return the new part, with the stored row of each method that had more runs."""
    if stored is None:
        return new
    before = {_key(row): row for row in stored["rows"]}
    rows, updated = [], set[str]()
    for row in new["rows"]:
        old, settings = before.get(_key(row)), {**new["spec"], **row["settings"]}
        if old is not None and old["runs"] > row["runs"]:
            expected = {**settings, **old.get("chosen", {})}
            settings = {**stored["spec"], **old["settings"]}
            changed = sorted(
                name for name in expected | settings if expected.get(name) != settings.get(name, _default(name))
            )
            if changed:
                fields = ", ".join(changed)
                raise SystemExit(f"{new['title']}: the stored result of {row['label']} has a different {fields}")
            row = old
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
    lines = [texts["head"].strip(), "", "## The paper's three claims", ""]
    for title, claim in CLAIMS.items():
        lines += [f"**{title}.**", "", *(f"- {line}" for line in claim(results) or [NOT_RUN]), ""]
    lines += [fill(texts["claims"], values), "", "## Overview", "", *_overview(results, texts.get("verdicts", {})), ""]
    remarks = texts.get("remarks", {})
    for recipe in all_recipes().values():
        lines += [f"## {recipe.number or 'Not in the paper'}: {recipe.title} (`{recipe.name}`)", ""]
        lines += _section(recipe, results[recipe.name]) if recipe.name in results else [NOT_RUN, ""]
        if recipe.name in results and recipe.name in remarks:
            lines += [fill(remarks[recipe.name], values), ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


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
