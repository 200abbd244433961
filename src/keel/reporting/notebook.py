"""What a notebook shows of a run or a comparison: the curves as a picture, the numbers beneath. Needs no network.

The picture takes the page's own text colour, so that it is readable in light and in dark.
"""

from typing import Any

import vl_convert
from jinja2 import Environment
from markupsafe import Markup

from keel.errors import KeelError
from keel.reporting.charts import VEGA_LITE
from keel.reporting.comparison import Comparison, compare
from keel.reporting.sections import sections
from keel.reporting.tables import Sheet, explanation, results
from keel.runs.folder import RunFolder
from keel.units import duration, percent, size

_INK, _LINE = "currentColor", "#8884"
_PAGE = Environment(autoescape=True).from_string(
    """<div>{{ picture }}
{% for sheet in sheets %}<table>{% if sheet.title %}<caption>{{ sheet.title }}</caption>{% endif %}
<thead><tr>{% for name in sheet.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in sheet.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table>{% endfor %}
<p>{{ words }}</p></div>"""
)


def comparison_html(comparison: Comparison) -> str:
    return _PAGE.render(picture=_picture(comparison), sheets=results(comparison), words=explanation(comparison))


def run_html(folder: RunFolder, summary: dict[str, Any]) -> str:
    """One run; without a picture where nothing was evaluated or there is no accuracy."""
    try:
        picture = _picture(compare([folder]))
    except KeelError:
        picture = Markup("")
    loss = summary["test_loss"]
    row: dict[str, str] = {
        "method": folder.title,
        "status": summary["status"],
        "rounds": str(summary["rounds"]),
        "accuracy": percent(summary["accuracy"]),
        "last accuracy": percent(summary["last_accuracy"]),
        "test loss": "-" if loss is None else f"{loss:.4g}",
        "sent": size(summary["bytes_down"] + summary["bytes_up"]),
        "time": duration(summary["seconds"]),
    }
    return _PAGE.render(
        picture=picture, sheets=[Sheet("", list(row), [list(row.values())], {})], words=str(folder.path)
    )


def _picture(comparison: Comparison) -> Markup:
    """The curves as SVG, one of each setting, in which every name is escaped."""
    pictures = []
    for part in sections(comparison):
        name = "accuracy-over-rounds"
        chart = (
            part.charts()[name]
            .properties(width=560, height=280)
            .configure(background="transparent")
            .configure_view(stroke=None)
            .configure_axis(labelColor=_INK, titleColor=_INK, gridColor=_LINE, domainColor=_LINE, tickColor=_LINE)
            .configure_legend(labelColor=_INK, orient="top", symbolType="stroke", symbolSize=400, symbolOpacity=1)
        )
        pictures.append(vl_convert.vegalite_to_svg(part.filled(name, chart), vl_version=VEGA_LITE))
    return Markup("\n".join(pictures))
