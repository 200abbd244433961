"""The paper's linear regression: GHBM with tau = 1/C under cyclic participation, compared with FedCM.

Writes the final losses (linear_regression.json) and the figure (linear_regression.svg) to the working directory. The
experiment is in src/keel/paper/regression.py; `keel paper run regression` runs it too.

    python examples/linear_regression.py [ROUNDS ORDERS]
"""

import json
import sys
from pathlib import Path

from keel.paper.computed import regression_curves, regression_panels, regression_records
from keel.paper.files import svg
from keel.paper.panels import make_figure
from keel.paper.regression import ORDERS


def main(rounds: int, orders: int) -> None:
    curves = regression_curves(rounds, orders)
    records = regression_records(curves)
    Path("linear_regression.json").write_text(json.dumps(records, indent=1))
    Path("linear_regression.svg").write_bytes(svg(make_figure(regression_panels(curves), "Linear regression")))
    for record in records:
        spread = f"{record['low']:9.3g} to {record['high']:9.3g}"
        print(f"learning rate {record['lr']:g}  {record['method']:24} {record['median']:9.3g}, range {spread}")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*arguments) if arguments else main(300, ORDERS)
