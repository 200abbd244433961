"""The parts of the site that are computed when it is built, and the checks of the result.

A page is Markdown. A comment `<!-- site: NAME ARGUMENTS -->` on a line of its own is replaced by what `sources.py` has
under the name: the help of a command, the output of an example, a figure. Links that lead out of docs/ are rewritten
(`links.py`). What a page then says is also written as plain text (`plain_text.py`).
"""

from typing import Any

from _extension import links, plain_text, sources


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", sources.expand)
    app.connect("build-finished", plain_text.write)
    app.connect("build-finished", links.check)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
