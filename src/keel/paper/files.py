"""The files of a rendered result: tables as text, Markdown, LaTeX and CSV, figures as HTML, SVG and PNG."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from keel.paper.results import Result
from keel.paper.views import View, title_of
from keel.report import drawing
from keel.report.tables import csv_of, latex, latex_note, markdown, text_of
from keel.runs.files import write_atomic


def write_files(result: Result, view: View, folder: Path) -> list[Path]:
    """Write result.json and its renderings to a folder, and return the paths."""
    title = title_of(result)
    texts = {
        "result.json": json.dumps(result, indent=1, ensure_ascii=False) + "\n",
        "table.txt": "\n\n".join([title, *map(text_of, view.sheets), *view.notes]) + "\n",
        "table.md": "\n\n".join([f"# {title}", *map(markdown, view.sheets), *view.notes]) + "\n",
        "table.tex": "\n\n".join([f"% {title}", *map(latex, view.sheets), *map(latex_note, view.notes)]) + "\n",
        "table.csv": csv_of(view.records),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    if view.figure is not None:
        contents |= draw(view.figure, view.notes)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomic(folder / name, [content])
    return [folder / name for name in contents]


def draw(figure: dict[str, Any], notes: Sequence[str] = ()) -> dict[str, bytes]:
    """Return a figure as SVG, as PNG, and as HTML that opens offline and contains the notes."""
    images = drawing.draw([(figure, "svg"), (figure, "png")])
    return {"figure.html": _page(figure, notes).encode(), "figure.svg": images[0], "figure.png": images[1]}


def svg(figure: dict[str, Any]) -> bytes:
    [image] = drawing.draw([(figure, "svg")])
    return image


def _page(figure: dict[str, Any], notes: Sequence[str]) -> str:
    """Return a page that draws the figure in the browser, above the notes."""
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    chart = json.dumps(figure).replace("<", "\\u003c")  # no text of a figure ends the script
    return f"""<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<title>{escape(figure["title"]["text"])}</title>
<script>{drawing.browser_script()}</script>
</head>
<body>
<div id="chart"></div>
<script>vegaEmbed("#chart", {chart}, {{"renderer": "svg"}}).catch(console.error);</script>
<div style="font: 14px sans-serif; max-width: 60em">{paragraphs}</div>
</body>
</html>
"""
