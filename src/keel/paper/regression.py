"""The linear regression of the paper: GHBM with tau = 1/C under cyclic participation against FedCM.

Ten clients hold 640 observations each of f(x) = 10 x^2 + 5 x - 1, from disjoint parts of [-10, 10]. A fifth of them
takes part in a round, in a fixed order, with J = 2 full-batch steps. There all clients share one optimum; in the
second case each client's curve is moved by its own amount, so that their optima really differ, and in the third the
gradient also has a smaller weight beside the momentum.
"""

import numpy as np
import torch
from torch import Tensor, nn

from keel.data.federated import Examples, FederatedData, Partition
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task

CLIENTS, EXAMPLES, STEPS, RATE = 10, 640, 2, 0.2
LR = 0.1
METHODS = {
    "FedCM, C = 1": ("fedcm", "alpha", 1.0),
    "FedCM, C = 0.2": ("fedcm", "alpha", RATE),
    "GHBM tau = 1/C, C = 0.2": ("ghbm_theory", "beta", RATE),
}
"""Algorithm, what it calls the gradient's weight, and the share of clients in a round."""
CASES = {
    "one optimum for all (the paper's case)": (0.0, 0.3),
    "optima that differ": (1.0, 0.3),
    "optima that differ, weight 0.1": (1.0, 0.1),
}
"""How much the clients' curves differ, and the gradient's weight."""


def losses(case: str, rounds: int) -> dict[str, list[float]]:
    """Of each method, the loss above its least value after each round."""
    differing, weight = CASES[case]
    data = observations(differing)
    return {method: excess_losses(method, data, weight, rounds) for method in METHODS}


def observations(differing: float) -> FederatedData:
    """Inputs (z^2, z, 1) for z = x / 10; client i's targets are moved by `differing` times its own draw."""
    x = np.linspace(-10, 10, CLIENTS * EXAMPLES)
    client = np.repeat(np.arange(CLIENTS), EXAMPLES)
    shift = np.random.default_rng(0).normal(size=CLIENTS)[client]
    targets = (10 * x**2 + 5 * x - 1) / 1000 + differing * shift
    z = x / 10
    inputs = torch.from_numpy(np.stack([z**2, z, np.ones_like(z)], axis=1)).float()
    examples = Examples(inputs, torch.from_numpy(targets).float())
    parts = [np.flatnonzero(client == c) for c in range(CLIENTS)]
    return FederatedData("regression", examples, examples, Partition.of(parts), classes=0)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def least_loss(data: FederatedData) -> float:
    """The loss at the least-squares solution over all clients."""
    inputs, targets = data.train.inputs.double(), data.train.targets.double()
    best = torch.linalg.lstsq(inputs, targets[:, None]).solution
    return float(((inputs @ best).squeeze(1) - targets).pow(2).mean())


def excess_losses(method: str, data: FederatedData, weight: float, rounds: int) -> list[float]:
    """The loss over all clients' data above its least value, after each round."""
    algorithm, weighs, rate = METHODS[method]
    spec = make_spec(
        {
            "rounds": rounds,
            "algorithm": {"name": algorithm, weighs: weight},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            "local": {"steps": STEPS, "batch": EXAMPLES, "lr": LR},
            # FedCM's server moves by J l along its momentum; GHBM's theory version takes that as its own rate
            "server": {"lr": STEPS * LR if algorithm == "ghbm_theory" else 1.0},
            "participation": {"rate": rate, "sampler": "cyclic"},
            "evaluation": {"every": 1, "last": 1},
        }
    )
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    training = Training(spec, make_task(spec, module=module, data=data, loss=squared_error))
    found: list[float] = []
    training.run(training.start(), [lambda record, *_: found.append(record["test_loss"])])
    least = least_loss(data)
    return [max(loss - least, 1e-12) for loss in found]
