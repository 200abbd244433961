"""The paper's linear regression: GHBM with tau = 1/C under cyclic participation, compared with FedCM.

Each of ten clients has 640 observations of f(x) = 10 x^2 + 5 x - 1 from its part of [-10, 10]. The participation rate
is 0.2, in a fixed order, with J = 2 full-batch local steps. In the paper's case all clients share one optimum. Two
cases are Keel's additions: the targets of each client are shifted, so that the clients' optima differ, and the
gradient has a smaller weight relative to the momentum.
"""

import numpy as np
import torch
from torch import Tensor, nn

from keel.config.defaults import make_spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.runs.build import build, make_task

CLIENTS, EXAMPLES, STEPS, RATE = 10, 640, 2, 0.2
LR = 0.1
METHODS = {
    "FedCM, C = 1": ("fedcm", "alpha", 1.0),
    "FedCM, C = 0.2": ("fedcm", "alpha", RATE),
    "GHBM tau = 1/C, C = 0.2": ("ghbm_theory", "beta", RATE),
}
"""Algorithm, its name for the weight of the gradient, and participation rate."""
CASES = {
    "one optimum for all (the paper's case)": (0.0, 0.3),
    "optima that differ": (1.0, 0.3),
    "optima that differ, weight 0.1": (1.0, 0.1),
}
"""Standard deviation of the clients' shifts, and weight of the gradient."""


def losses(case: str, rounds: int) -> dict[str, list[float]]:
    """Return the excess loss of each method after each round."""
    shift, weight = CASES[case]
    data = observations(shift)
    return {method: excess_losses(method, data, weight, rounds) for method in METHODS}


def observations(shift: float) -> FederatedData:
    """Return inputs (z^2, z, 1) with z = x / 10, and targets shifted by `shift` times a normal draw per client."""
    x = np.linspace(-10, 10, CLIENTS * EXAMPLES)
    client = np.repeat(np.arange(CLIENTS), EXAMPLES)
    shifts = np.random.default_rng(0).normal(size=CLIENTS)[client]
    targets = (10 * x**2 + 5 * x - 1) / 1000 + shift * shifts
    z = x / 10
    inputs = torch.from_numpy(np.stack([z**2, z, np.ones_like(z)], axis=1)).float()
    examples = Examples(inputs, torch.from_numpy(targets).float())
    parts = [np.flatnonzero(client == c) for c in range(CLIENTS)]
    return FederatedData("regression", examples, examples, Partition.of(parts), classes=0)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def least_loss(data: FederatedData) -> float:
    """Return the loss of the least-squares solution over all clients."""
    inputs, targets = data.train.inputs.double(), data.train.targets.double()
    best = torch.linalg.lstsq(inputs, targets[:, None]).solution
    return float(((inputs @ best).squeeze(1) - targets).pow(2).mean())


def excess_losses(method: str, data: FederatedData, weight: float, rounds: int) -> list[float]:
    """Return the loss over all clients' data minus the least possible loss, after each round."""
    algorithm, weight_name, rate = METHODS[method]
    spec = make_spec(
        {
            "rounds": rounds,
            "algorithm": {"name": algorithm, weight_name: weight},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            "local": {"steps": STEPS, "batch": EXAMPLES, "lr": LR},
            # FedCM's server steps by J l along its momentum; for GHBM's theory version that is the server rate
            "server": {"lr": STEPS * LR if algorithm == "ghbm_theory" else 1.0},
            "participation": {"rate": rate, "sampler": "cyclic"},
            "evaluation": {"every": 1, "last": 1},
            "engine": {"name": "serial"},  # three parameters: starting processes would take longer than the training
        }
    )
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    loop = build(spec, make_task(spec, module=module, data=data, loss=squared_error)).loop
    test_losses: list[float] = []
    loop.run(loop.start(), [lambda record, *_: test_losses.append(record["test_loss"])])
    least = least_loss(data)
    return [max(loss - least, 1e-12) for loss in test_losses]
