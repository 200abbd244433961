"""The notebooks of examples/notebooks: run cell by cell, and shown with what each cell prints and returns."""

import json
from pathlib import Path
from typing import Any

from _extension.links import rewrite
from _extension.running import Session, empty_folder

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def markdown(name: str) -> str:
    """Run a notebook, and return its cells with their output."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    session, parts = Session(f"{name}.ipynb"), []
    with empty_folder():
        for cell in cells:
            text = "".join(cell["source"])
            is_text = cell["cell_type"] == "markdown"
            parts.append(rewrite(text, "examples/notebooks", "page") if is_text else _with_output(session, text))
    download = (
        f"This page is a notebook, run when the site was built: [{name}.ipynb](../examples/notebooks/{name}.ipynb)."
    )
    return "\n\n".join([parts[0], download, *parts[1:]])


def _with_output(session: Session, code: str) -> str:
    lines = [line for line in code.splitlines() if not line.startswith("%pip")]
    printed, value = session.run("\n".join(lines))
    parts = [f"```python\n{code}\n```"]
    if printed:
        parts.append(f"```text\n{printed}\n```")
    if value is not None:
        parts.append(_shown(value))
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    """Return a value as a notebook shows it."""
    if hasattr(value, "_repr_html_"):
        lines = [line.strip() for line in value._repr_html_().splitlines() if line.strip()]
        return "<div class='output'>\n" + "\n".join(lines) + "\n</div>"
    return f"```text\n{value!r}\n```"
