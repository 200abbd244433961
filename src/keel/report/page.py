"""The report page: one HTML file that opens offline in any browser, and its charts as files."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

from keel.report.charts import PAPER, colours, dashes
from keel.report.comparison import Comparison, ranks_of
from keel.report.drawing import CannotDraw, browser_script, draw
from keel.report.explanations import setting_notes
from keel.report.label_distribution import heterogeneity
from keel.report.picture import Deviation
from keel.report.sections import SHOWN, Rows, Section, sections
from keel.report.tables import change, client_sheet, difference_sheet, final_text, other_sheet, privacy_sheet
from keel.runs.files import write_atomic
from keel.units import duration, size

SMOOTHED = 100
"""Rounds from which on curves are smoothed initially."""
STEPS = 100
"""Minimum number of steps of the slider."""


def write_report(
    comparison: Comparison, path: Path, deviation: Deviation | None = None, title: str | None = None
) -> str | None:
    """Write the tables and charts of all settings as one HTML file without external resources.

    Args:
        comparison: What the page is about.
        path: The file.
        deviation: How far momentum is from the direction of all clients, to be shown in the first setting.
        title: The heading of the page; by default the data set and the model.

    Returns:
        Why the page has no charts; None if it has them.
    """
    try:
        vega, problem = browser_script(), None
    except CannotDraw as error:
        vega, problem = "", str(error)
    page = page_html(comparison, vega, problem, deviation=deviation, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, [page.encode()])  # a full disk must not destroy an earlier page
    return problem


def page_html(
    comparison: Comparison,
    vega: str,
    problem: str | None = None,
    update: str = "",
    deviation: Deviation | None = None,
    title: str | None = None,
) -> str:
    """Return the page.

    Args:
        comparison: What the page is about.
        vega: The script that draws charts in a browser.
        problem: Why there is no such script.
        update: Where the page fetches its next state, if a server answers there.
        deviation: See `write_report`.
        title: See `write_report`.
    """
    parts = sections(comparison, deviation or {})
    data = [_data(part) for part in parts]
    rows = {id(method): row for method, row in zip(comparison.methods, comparison.rows(), strict=True)}
    tables = [method.table for method in comparison.methods]
    seeds = {len(method.seeds) for method in comparison.methods}
    runs = sum(len(method.seeds) for method in comparison.methods)
    return _render(
        vega,
        update,
        {"paper": PAPER, "sections": data},
        title=title or " · ".join(sorted({setting.heading for setting in comparison.settings})),
        setting="; ".join(
            [
                f"{runs} run{'s' * (runs != 1)}",
                f"{_list(seeds)} seed{'s' * (seeds != {1})}",
                f"{_list({table['rounds'] for table in tables})} rounds",
                f"participation rate {_list({100 * table['participation']['rate'] for table in tables})}\u00a0%",
            ]
        ),
        sections=[
            _view(part, [rows[id(method)] for method in part.methods]) | {"charts": list(content["charts"])}
            for part, content in zip(parts, data, strict=True)
        ],
        window=comparison.window,
        skipped=comparison.skipped,
        problem=problem,
    )


def waiting_html(reason: str, vega: str, update: str) -> str:
    """Return a page without runs, which fetches its next state from `update`."""
    return _render(vega, update, {"paper": PAPER, "sections": []}, title="Waiting for runs", setting=reason)


def _render(vega: str, update: str, data: dict[str, Any], **content: Any) -> str:
    script = f"\n{vega}\n{_text('page.js')}\n"
    policy = security_policy(script, connects=bool(update))
    return _template().render(policy=policy, update=update, data=_json(data), script=Markup(script), **content)


@cache
def _template() -> Template:
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_text("report.html.j2"))


def security_policy(script: str, connects: bool = False) -> str:
    """Return the content-security policy of the page: it runs this script and no other, and loads nothing.

    Args:
        script: The script.
        connects: Allow it to fetch from the server of the page.
    """
    digest = b64encode(sha256(script.encode()).digest()).decode()
    connect = "; connect-src 'self'" if connects else ""
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'{connect}"
    )


def write_charts(comparison: Comparison, folder: Path, formats: Sequence[str] = ("svg", "pdf", "png")) -> None:
    """Write each chart in these formats; with several settings, in a folder for each.

    Raises:
        CannotDraw: Charts cannot be drawn on this machine.
    """
    parts = sections(comparison)
    files, charts = [], []
    for number, part in enumerate(parts, start=1):
        target = folder / f"setting-{number}" if len(parts) > 1 else folder
        for name, chart in part.charts().items():
            spec = part.filled(name, chart.properties(width=640)) | {"config": PAPER}
            files += [target / f"{_file_name(name)}.{suffix}" for suffix in formats]
            charts += [(spec, suffix) for suffix in formats]
    for file, content in zip(files, draw(charts), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _file_name(chart: str) -> str:
    """Return the name of a chart without characters that a file name may not have: users name metrics."""
    return re.sub(r"[^\w.-]", "_", chart)


def _view(part: Section, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the template shows of a setting."""
    keys, values = part.differing
    dashed = [" ".join(map(str, dash)) for dash in dashes(len(rows))]
    styles = zip(part.ranked, colours(len(rows)), dashed, strict=True)
    ranks = ranks_of([method.score for method in part.methods])
    base = None if part.baseline is None else part.labels[part.baseline]
    return {
        "heading": part.setting.heading,
        "description": part.setting.description,
        "methods": [
            {"index": index, "label": part.labels[index], "colour": colour, "dash": dash, "shown": order < SHOWN}
            for order, (index, colour, dash) in enumerate(styles)
        ],
        "rows": [
            (label, {1: "best", 2: "next"}.get(rank, "") if isfinite(method.score) else "", _cells(row))
            for label, method, rank, row in zip(part.labels, part.methods, ranks, rows, strict=True)
        ],
        "base": base,
        "differences": None if base is None else difference_sheet(rows, part.labels, base),
        "metric": part.primary,
        "target": part.target,
        "target_text": part.primary.text(part.target),
        "slider": _slider(part),
        "other": {name: quantity.title for name, quantity in part.other_quantities.items()},
        "other_table": other_sheet(part.methods, part.labels),
        "clients_table": client_sheet(part.methods, part.labels),
        "clients": part.client_statistics and _clients(part.client_statistics),
        "privacy": privacy_sheet(part.methods, part.labels),
        "smoothing": _smoothing(part),
        "several_seeds": any("seeds" in curve["series"][part.primary.name] for curve in part.curves),
        "modelled": part.methods[0].modelled,
        "seed": part.cohort_run and part.cohort_run.table["seed"],
        "notes": setting_notes(part.setting),
        "keys": keys,
        "values": list(zip(part.labels, values, strict=True)),
        "seeds": [", ".join(map(str, sorted(method.seeds))) for method in part.methods],
        "commands": list(zip(part.labels, part.commands, strict=True)),
    }


def _smoothing(part: Section) -> int:
    """Return the rounds over which the page averages curves initially: those of the table, if several are compared."""
    several = len(part.methods) > 1 and max(method.table["rounds"] for method in part.methods) >= SMOOTHED
    return max(method.window for method in part.methods) if several else 1


def _slider(part: Section) -> dict[str, float]:
    """Return the range of the targets that can be selected, its step and its initial value; in percent for a fraction.

    The range covers every value that a method reaches. Without a target, the slider starts at the best value.
    """
    levels = [level for method in part.methods for level, _ in method.milestones]
    levels += [] if part.target is None else [part.target]
    least, most = min(levels, default=0.0), max(levels, default=0.0)
    if part.primary.is_fraction:
        lowest, highest, step, scale = int(1000 * least) / 10, (int(1000 * most) + 1) / 10, 0.1, 100
    else:
        span = (most - least) / STEPS or abs(most) / STEPS or 1
        step, scale = 10.0 ** max(-300, floor(log10(span))), 1
        lowest, highest = _rounded(floor(least / step) * step), _rounded(ceil(most / step) * step)
    best = highest if part.primary.maximize else lowest
    value = best if part.target is None else scale * part.target
    return {"lowest": lowest, "highest": highest, "step": step, "value": value}


def _rounded(value: float) -> float:
    """Return the value without the rounding error of a multiplication."""
    return float(f"{value:.12g}")


def _clients(statistics: dict[str, Any]) -> str:
    shown = len(statistics["picture"]["clients"])
    return f"{heterogeneity(statistics)} Shown: {shown:,} of {statistics['clients']:,} clients."


def _cells(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the cells of a row after the label: their text, and the value to sort by."""
    rounds = "-" if row["target"] is None else str(row["rounds_to_target"] or "never")
    seconds = row["seconds_to_target"]
    return [
        (final_text(row).replace("± ", "±\u00a0").replace(" %", "\u00a0%"), row[f"{row['metric']}_mean"]),
        (rounds, row["rounds_to_target"]),
        (change(row["rounds_saved"]), row["rounds_saved"]),
        (size(row["bytes_to_target"]), row["bytes_to_target"]),
        (change(row["bytes_saved"]), row["bytes_saved"]),
        ("-" if seconds is None else duration(seconds), seconds),
        (size(row["bytes_total"]), row["bytes_total"]),
    ]


def _data(part: Section) -> dict[str, Any]:
    """Return the data of the script."""
    return {
        "labels": part.labels,
        "curves": part.curves,
        "drift": part.drift,
        "other": [{**other, **clients} for other, clients in zip(part.other, part.clients, strict=True)],
        "heatmaps": {name: _packed(rows) for name, rows in part.heatmaps.items()},
        "charts": {name: chart.to_dict(validate=False) for name, chart in part.charts(live=True).items()},
        "final": [[method.value_mean, method.value_std or 0.0] for method in part.methods],
        "milestones": [
            [[level, spent.rounds, spent.bytes, spent.seconds] for level, spent in method.milestones]
            for method in part.methods
        ],
        "metric": part.primary.name,
        "sign": 1 if part.primary.maximize else -1,
        "is_fraction": part.primary.is_fraction,
        "baseline": part.baseline,
        "target": part.target,
        "unit_seconds": part.clock[1],
    }


def _packed(rows: Rows) -> dict[str, Any]:
    """Return rows without repeating the names of their fields."""
    return {"fields": list(rows[0]) if rows else [], "rows": [list(row.values()) for row in rows]}


def _json(value: Any) -> Markup:
    """Return JSON for a script element; no text in it can close the element."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
