"""A program that draws charts: reads tasks as JSON from standard input and writes each result to its file.

It is a process of its own because V8, in which vl_convert runs Vega, ends the whole process when it cannot reserve
address space. It imports nothing of Keel, so that it starts quickly.
"""

import json
import sys
from pathlib import Path
from typing import Any

import vl_convert


def drawn(form: str, chart: dict[str, Any], version: str) -> bytes:
    """Return a chart in a format, or for "js" the script that draws charts in a browser."""
    match form:
        case "js":
            return vl_convert.javascript_bundle(vl_version=version).encode()  # type: ignore[call-arg]
        case "svg":
            return vl_convert.vegalite_to_svg(chart, vl_version=version).encode()
        case "pdf":
            return vl_convert.vegalite_to_pdf(chart, vl_version=version)
        case _:
            return vl_convert.vegalite_to_png(chart, vl_version=version, scale=2)


if __name__ == "__main__":
    for task in json.load(sys.stdin):
        Path(task["file"]).write_bytes(drawn(task["form"], task["chart"], task["version"]))
