"""The report: one HTML file that opens offline in any browser, and its charts as files."""

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment
from markupsafe import Markup

from keel.reporting.charts import PAPER, VEGA_LITE, colours, dashes
from keel.reporting.comparison import Comparison
from keel.reporting.sections import SHOWN, Rows, Section, sections
from keel.reporting.tables import accuracy, change, heterogeneity
from keel.units import duration, percent, size


def write_report(comparison: Comparison, path: Path) -> None:
    """Tables and charts of all settings, with all that the page needs inside it."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_text("report.html.j2"))
    parts = sections(comparison)
    data = [_data(part) for part in parts]
    rows = {id(method): row for method, row in zip(comparison.methods, comparison.rows(), strict=True)}
    tables = [method.table for method in comparison.methods]
    seeds = {len(method.seeds) for method in comparison.methods}
    runs = sum(len(method.seeds) for method in comparison.methods)
    page = template.render(
        title=" · ".join(sorted({f"{table['data']['name']}, {table['model']['name']}" for table in tables})),
        setting="; ".join(
            [
                f"{runs} run{'s' * (runs != 1)}",
                f"{_few(seeds)} seed{'s' * (seeds != {1})}",
                f"{_few({table['rounds'] for table in tables})} rounds",
                f"{_few({100 * table['participation']['rate'] for table in tables})} % of the clients in a round",
            ]
        ),
        sections=[
            _view(part, [rows[id(method)] for method in part.methods]) | {"charts": list(told["charts"])}
            for part, told in zip(parts, data, strict=True)
        ],
        window=comparison.window,
        data=_json({"paper": PAPER, "sections": data}),
        script=Markup(_text("page.js")),
        vega=Markup(vl_convert.javascript_bundle(vl_version=VEGA_LITE)),  # type: ignore[call-arg]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")  # a full disk must not spoil an earlier page
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_charts(comparison: Comparison, folder: Path) -> None:
    """Each chart as SVG, PDF and PNG, for a paper or a README; of several settings each in a folder of its own."""
    parts = sections(comparison)
    for number, part in enumerate(parts, start=1):
        place = folder / f"setting-{number}" if len(parts) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        for name, chart in part.charts().items():
            spec = part.filled(name, chart.properties(width=640)) | {"config": PAPER}
            svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
            (place / f"{name}.svg").write_text(svg, encoding="utf-8")
            (place / f"{name}.pdf").write_bytes(vl_convert.vegalite_to_pdf(spec, vl_version=VEGA_LITE))
            (place / f"{name}.png").write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=2))


def _view(part: Section, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template shows of a setting."""
    levels = [level for method in part.methods for level, _ in method.standing]
    levels += [] if part.target is None else [part.target]
    keys, values = part.differing
    dashed = [" ".join(map(str, dash)) for dash in dashes(len(rows))]
    styles = zip(part.ranked, colours(len(rows)), dashed, strict=True)
    accuracies = [row["accuracy_mean"] for row in rows]
    places = [a is not None and 1 + sum(other > a for other in accuracies if other is not None) for a in accuracies]
    return {
        "heading": part.setting.heading,
        "particular": part.setting.particulars,
        "methods": [
            {"place": place, "label": part.labels[place], "colour": colour, "dash": dash, "shown": rank < SHOWN}
            for rank, (place, colour, dash) in enumerate(styles)
        ],
        "rows": [
            (label, {1: "best", 2: "next"}.get(place, ""), _cells(row))
            for label, place, row in zip(part.labels, places, rows, strict=True)
        ],
        "base": None if part.baseline is None else part.labels[part.baseline],
        "target": part.target,
        "target_text": percent(part.target),
        "lowest": int(1000 * min(levels, default=0.0)) / 10,
        "highest": (int(1000 * max(levels, default=0.0)) + 1) / 10,
        "held": part.held
        and f"{heterogeneity(part.held)} Drawn: {len(part.held['picture']['clients'])} of "
        f"{part.held['clients']:,} clients.",
        "seed": part.cohorts and part.cohorts.table["seed"],
        "keys": keys,
        "values": list(zip(part.labels, values, strict=True)),
        "seeds": [", ".join(map(str, sorted(method.seeds))) for method in part.methods],
        "commands": list(zip(part.labels, part.commands, strict=True)),
    }


def _cells(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """The table's cells after the name: their text, and what they are sorted by."""
    rounds = "-" if row["target"] is None else str(row["rounds_to_target"] or "never")
    seconds = row["seconds_to_target"]
    return [
        (accuracy(row).replace("± ", "±\u00a0").replace(" %", "\u00a0%"), row["accuracy_mean"]),
        (rounds, row["rounds_to_target"]),
        (change(row["rounds_saved"]), row["rounds_saved"]),
        (size(row["bytes_to_target"]), row["bytes_to_target"]),
        (change(row["bytes_saved"]), row["bytes_saved"]),
        ("-" if seconds is None else duration(seconds), seconds),
    ]


def _data(part: Section) -> dict[str, Any]:
    """What the script computes with."""
    return {
        "labels": part.labels,
        "curves": part.curves,
        "drift": part.drift,
        "pictures": {name: _packed(rows) for name, rows in part.pictures.items()},
        "charts": {name: chart.to_dict() for name, chart in part.charts(live=True).items()},
        "final": [[method.accuracy_mean, method.accuracy_std or 0.0] for method in part.methods],
        "standing": [
            [[level, spent.rounds, spent.bytes, spent.seconds] for level, spent in method.standing]
            for method in part.methods
        ],
        "baseline": part.baseline,
        "target": part.target,
        "second": part.clock[1],
    }


def _packed(rows: Rows) -> dict[str, Any]:
    """Rows without their fields' names in each."""
    return {"fields": list(rows[0]) if rows else [], "rows": [list(row.values()) for row in rows]}


def _json(value: Any) -> Markup:
    """As the content of a script element, in which no text can end it."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _few(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
