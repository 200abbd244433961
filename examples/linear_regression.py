"""The paper's linear regression: GHBM with tau = 1/C under cyclic participation against FedCM.

The experiment is `keel paper run regression` (src/keel/paper/regression.py). This writes its losses
(linear_regression.json) and the figure (linear_regression.svg) into the working folder.

    python examples/linear_regression.py
"""

import json
import sys
from pathlib import Path

from keel.paper.references import regression_panels
from keel.paper.views import drawn, figure_of


def main(rounds: int) -> None:
    panels = regression_panels(rounds)
    Path("linear_regression.json").write_text(json.dumps(panels))
    Path("linear_regression.svg").write_bytes(drawn(figure_of(panels, "Linear regression"))["figure.svg"])
    for panel in panels:
        print(panel["title"])
        for method in panel["labels"]:
            last = [row["mean"] for row in panel["rows"] if row["method"] == method][-1]
            print(f"  {method:24} {last:.2e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
