"""HTML for notebooks: the curves of a run or a comparison as SVG, above a table. Requires no network.

The chart uses the text colour of the notebook, so that it is readable in light and dark themes.
"""

from jinja2 import Environment
from markupsafe import Markup

from keel.core.records import Summary, final_value, last_value, primary_metric
from keel.errors import KeelError
from keel.report.comparison import Comparison, compare
from keel.report.drawing import CannotDraw, draw
from keel.report.explanations import difference_notes, explanation
from keel.report.sections import sections
from keel.report.tables import Sheet, results
from keel.runs.folder import RunFolder
from keel.units import duration, size

_INK, _LINE = "currentColor", "#8884"
_PAGE = Environment(autoescape=True).from_string(
    """<div>{{ chart }}
{% for sheet in sheets %}<table>{% if sheet.title %}<caption>{{ sheet.title }}</caption>{% endif %}
<thead><tr>{% for name in sheet.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in sheet.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table>{% endfor %}
{% for note in notes %}<p>{{ note }}</p>
{% endfor %}</div>"""
)


def comparison_html(comparison: Comparison) -> str:
    """Return the HTML of a comparison: curves, results table and notes."""
    notes = [*difference_notes(comparison), explanation(comparison), *(f"Skipped {run}" for run in comparison.skipped)]
    chart = Markup("")
    if comparison.evaluated:
        try:
            chart = _chart(comparison)
        except CannotDraw as error:
            notes.append(str(error))
    return _PAGE.render(chart=chart, sheets=results(comparison), notes=notes)


def table_html(sheets: list[Sheet], notes: list[str]) -> str:
    """Return the HTML of tables with notes below them."""
    return _PAGE.render(chart="", sheets=sheets, notes=notes)


def run_html(folder: RunFolder, summary: Summary) -> str:
    """Return the HTML of one run; without a chart if it was never evaluated."""
    try:
        chart = _chart(compare([folder]))
    except KeelError:
        chart = Markup("")
    primary, loss = primary_metric(summary), summary["test_loss"]
    row: dict[str, str] = {
        "method": folder.title,
        "status": summary["status"],
        "rounds": str(summary["rounds"]),
        primary.label: primary.text(final_value(summary)),
        f"last {primary.label}": primary.text(last_value(summary)),
        **({} if primary.name == "test_loss" else {"test loss": "-" if loss is None else f"{loss:.4g}"}),
        "bytes": size(summary["bytes_down"] + summary["bytes_up"]),
        "wall-clock time": duration(summary["seconds"]),
    }
    sheet = Sheet("", list(row), [list(row.values())], {})
    return _PAGE.render(chart=chart, sheets=[sheet], notes=[str(folder.path)])


def _chart(comparison: Comparison) -> Markup:
    """Return the curves of the primary metric as SVG, one chart per setting; names in it are escaped."""
    charts = []
    for part in sections(comparison):
        name = f"{part.primary.name}-over-rounds"
        chart = (
            part.charts()[name]
            .properties(width=560, height=280)
            .configure(background="transparent")
            .configure_view(stroke=None)
            .configure_axis(labelColor=_INK, titleColor=_INK, gridColor=_LINE, domainColor=_LINE, tickColor=_LINE)
            .configure_legend(labelColor=_INK, orient="top", symbolType="stroke", symbolSize=400, symbolOpacity=1)
        )
        charts.append((part.filled(name, chart), "svg"))
    return Markup("\n".join(image.decode() for image in draw(charts)))
