"""The paper's linear regression: GHBM with tau = 1/C under cyclic participation against FedCM.

Ten clients hold 640 observations each of f(x) = 10 x^2 + 5 x - 1, from disjoint parts of [-10, 10]. A fifth of them
takes part in a round, in a fixed order, with J = 2 full-batch steps. There all clients share one optimum; in the
second case each client's curve is moved by its own amount, so that their optima really differ. Writes the losses
(linear_regression.json) and the figure (linear_regression.svg) into the working folder.

    python examples/linear_regression.py
"""

import json
import sys
from pathlib import Path

import altair as alt
import numpy as np
import torch
from torch import Tensor, nn

import keel
from keel.rounds import Training
from keel.task import make_task

CLIENTS, EXAMPLES, STEPS, RATE = 10, 640, 2, 0.2
LR, ALPHA = 0.1, 0.3
METHODS = {
    "FedCM, C = 1": ({"name": "fedcm", "alpha": ALPHA}, 1.0),
    "FedCM, C = 0.2": ({"name": "fedcm", "alpha": ALPHA}, RATE),
    "GHBM tau = 1/C, C = 0.2": ({"name": "ghbm_theory", "beta": ALPHA}, RATE),
}


def observations(differing: float) -> keel.FederatedData:
    """Inputs (z^2, z, 1) for z = x / 10; client i's targets are moved by `differing` times its own draw."""
    x = np.linspace(-10, 10, CLIENTS * EXAMPLES)
    client = np.repeat(np.arange(CLIENTS), EXAMPLES)
    shift = np.random.default_rng(0).normal(size=CLIENTS)[client]
    targets = (10 * x**2 + 5 * x - 1) / 1000 + differing * shift
    z = x / 10
    inputs = torch.from_numpy(np.stack([z**2, z, np.ones_like(z)], axis=1)).float()
    examples = keel.Examples(inputs, torch.from_numpy(targets).float())
    parts = [np.flatnonzero(client == c) for c in range(CLIENTS)]
    return keel.FederatedData("regression", examples, examples, keel.Partition.of(parts), classes=0)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def least_loss(data: keel.FederatedData) -> float:
    """The loss at the least-squares solution over all clients."""
    inputs, targets = data.train.inputs.double(), data.train.targets.double()
    best = torch.linalg.lstsq(inputs, targets[:, None]).solution
    return float(((inputs @ best).squeeze(1) - targets).pow(2).mean())


def excess_losses(method: str, data: keel.FederatedData, rounds: int) -> list[float]:
    """The loss over all clients' data above its least value, after each round."""
    algorithm, rate = METHODS[method]
    spec = keel.make_spec(
        {
            "rounds": rounds,
            "algorithm": algorithm,
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            "local": {"steps": STEPS, "batch": EXAMPLES, "lr": LR},
            # FedCM's server moves by J l along its momentum; GHBM's theory version takes that as its own rate
            "server": {"lr": STEPS * LR if algorithm["name"] == "ghbm_theory" else 1.0},
            "participation": {"rate": rate, "sampler": "cyclic"},
            "evaluation": {"every": 1, "last": 1},
        }
    )
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    training = Training(spec, make_task(spec, module=module, data=data, loss=squared_error))
    losses: list[float] = []
    training.run(training.start(), [lambda record, *_: losses.append(record["test_loss"])])
    least = least_loss(data)
    return [max(loss - least, 1e-12) for loss in losses]


def main(rounds: int) -> None:
    cases = {"one optimum for all (the paper's case)": 0.0, "optima that differ": 1.0}
    rows = [
        {"case": case, "method": method, "round": t, "loss": loss}
        for case, differing in cases.items()
        for method in METHODS
        for t, loss in enumerate(excess_losses(method, observations(differing), rounds), start=1)
    ]
    Path("linear_regression.json").write_text(json.dumps(rows))
    names = list(METHODS)
    colours = alt.Scale(domain=names, range=["#0072B2", "#D55E00", "#009E73"])
    dashes = alt.Scale(domain=names, range=[[1, 0], [2, 2], [6, 3]])
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line()
        .encode(
            x=alt.X("round:Q"),
            y=alt.Y(
                "loss:Q", title="loss above its least value", scale=alt.Scale(type="log"), axis=alt.Axis(format="e")
            ),
            color=alt.Color("method:N", title=None, scale=colours),
            strokeDash=alt.StrokeDash("method:N", title=None, scale=dashes),
        )
        .properties(width=320, height=240)
        .facet(facet=alt.Facet("case:N", title=None, sort=list(cases)), columns=2)
        .configure_legend(orient="top", labelLimit=300, symbolSize=400)
    )
    chart.save("linear_regression.svg")
    for case in cases:
        print(case)
        for method in METHODS:
            last = [row["loss"] for row in rows if (row["case"], row["method"]) == (case, method)][-1]
            print(f"  {method:24} {last:.2e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
