"""The paper's linear regression: GHBM with tau = 1/C under cyclic participation, compared with FedCM.

Writes the losses (linear_regression.json) and the figure (linear_regression.svg) to the working directory. The
experiment is in src/keel/paper/regression.py; `keel paper run regression` runs it too.

    python examples/linear_regression.py
"""

import json
import sys
from pathlib import Path

from keel.paper.computed import regression_panels
from keel.paper.files import svg
from keel.paper.panels import make_figure


def main(rounds: int) -> None:
    panels = regression_panels(rounds)
    Path("linear_regression.json").write_text(json.dumps(panels))
    Path("linear_regression.svg").write_bytes(svg(make_figure(panels, "Linear regression")))
    for panel in panels:
        print(panel["title"])
        for method in panel["labels"]:
            final_loss = [row["mean"] for row in panel["rows"] if row["method"] == method][-1]
            print(f"  {method:24} {final_loss:.2e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
