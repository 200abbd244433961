"""Charts as images, and the script that draws charts in a browser. A process of its own makes them: see draw_charts."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any

from keel.errors import KeelError
from keel.report import draw_charts
from keel.report.charts import VEGA_LITE

Chart = dict[str, Any]
"""A chart as Vega-Lite, with its data."""


class CannotDraw(KeelError):
    """The process that draws failed: nothing can be drawn on this machine."""


def draw(charts: Iterable[tuple[Chart, str]]) -> list[bytes]:
    """Return each chart in its format: svg, pdf or png.

    Raises:
        CannotDraw: The process that draws failed, or was ended by a signal.
    """
    with TemporaryDirectory(prefix="keel-charts-") as folder:
        tasks = [
            {"file": f"{folder}/{number}", "form": form, "chart": chart, "version": VEGA_LITE}
            for number, (chart, form) in enumerate(charts)
        ]
        _run_drawing(json.dumps(tasks).encode())
        return [Path(folder, str(number)).read_bytes() for number in range(len(tasks))]


def _run_drawing(tasks: bytes) -> None:
    try:
        ended = subprocess.run(
            [sys.executable, "-P", draw_charts.__file__], input=tasks, capture_output=True, check=False
        )
    except OSError as error:  # no memory or no process left
        raise CannotDraw(f"charts cannot be drawn: {error}") from None
    if ended.returncode < 0:
        raise CannotDraw(
            f"charts cannot be drawn: the process that draws them was ended by {Signals(-ended.returncode).name}; "
            "raise the limit on address space (ulimit -v unlimited)"
        )
    if ended.returncode:
        found = re.search(r"^\w*(Error|Exception)\b.*", ended.stderr.decode(errors="replace"), re.MULTILINE)
        raise CannotDraw(f"charts cannot be drawn: {found[0] if found else f'exit code {ended.returncode}'}")


@cache
def browser_script() -> str:
    """Return the script that draws charts in a browser: Vega, Vega-Lite and vegaEmbed.

    Raises:
        CannotDraw: The process that makes it failed, or was ended by a signal.
    """
    [script] = draw([({}, "js")])
    return script.decode()
