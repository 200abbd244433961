"""The report: one HTML file that opens offline in any browser."""

import json
from importlib.resources import files
from pathlib import Path

import vl_convert
from jinja2 import Environment
from markupsafe import Markup

from keel.reporting.charts import VEGA_LITE, curves, who_holds_what
from keel.reporting.comparison import Comparison
from keel.reporting.tables import COLUMNS, explanation, heterogeneity, results


def write_report(comparison: Comparison, path: Path) -> None:
    """Curves over rounds and over bytes, and the table, with all that the page needs inside it."""
    template = Environment(autoescape=True).from_string(
        files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    charts = {over: curves(comparison, over).to_dict() for over in ("rounds", "bytes")}
    held = [told for told in comparison.holdings if "picture" in told]
    charts |= {f"held{number}": who_holds_what(told).to_dict() for number, told in enumerate(held)}
    tables = [method.table for method in comparison.methods]
    page = template.render(
        title=" · ".join(sorted({f"{table['data']['name']}, {table['model']['name']}" for table in tables})),
        setting="; ".join(
            [
                f"{_few({len(method.seeds) for method in comparison.methods})} seeds",
                f"{_few({table['rounds'] for table in tables})} rounds",
                f"{_few({100 * table['participation']['rate'] for table in tables})} % of the clients in a round",
            ]
        ),
        explanation=explanation(comparison),
        held=[
            f"{heterogeneity(told)} Drawn: {len(told['picture']['clients'])} of {told['clients']:,} clients."
            for told in held
        ],
        columns=COLUMNS,
        rows=results(comparison).rows,
        charts=Markup(json.dumps(charts).replace("<", "\\u003c")),
        vega=Markup(vl_convert.javascript_bundle(vl_version=VEGA_LITE)),  # type: ignore[call-arg]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")  # a full disk must not spoil an earlier page
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _few(values: set[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))


def write_charts(comparison: Comparison, folder: Path) -> None:
    """Each chart as an SVG file, for a paper or a README."""
    folder.mkdir(parents=True, exist_ok=True)
    for over in ("rounds", "bytes"):
        chart = (
            curves(comparison, over)
            .properties(width=640)
            .configure_legend(orient="top", symbolType="stroke", symbolSize=400, symbolOpacity=1, symbolStrokeWidth=2.5)
        )
        (folder / f"accuracy-over-{over}.svg").write_text(
            vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=VEGA_LITE), encoding="utf-8"
        )
