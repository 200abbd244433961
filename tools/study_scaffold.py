"""SCAFFOLD on CIFAR-10 at 16x16 in a second implementation: a plain loop that shares no code with Keel's algorithms.

    python tools/study_scaffold.py [ROUNDS]     writes results/scaffold.json

It separates three explanations of SCAFFOLD's result: an error in Keel's implementation, old control variates, and the
size of the correction itself. Control variates are stale as published ("stored"), or those of all clients are computed
anew at the server's model in every round ("refreshed"), from a random model or from one that FedAvg has trained.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from keel.config.defaults import make_spec
from keel.runs.build import make_task

RESULT = Path(__file__).parents[1] / "results/scaffold.json"
LAST = 20
"""The number of final rounds over which an accuracy is averaged."""
LR, BATCH, COHORT = 0.03, 64, 10
TASK = {
    "data": {"name": "cifar10", "size": 16, "alpha": 0.0, "augment": False},
    "model": {"name": "cnn"},
    "local": {"lr": LR, "batch": BATCH, "weight_decay": 0.0},
}


class Study:
    """The clients' data and the model."""

    def __init__(self) -> None:
        task = make_task(make_spec({**TASK, "algorithm": {"name": "scaffold"}}))
        self.model, transform = task.module, task.data.transform
        examples = [task.data.client(number) for number in range(task.data.partition.clients)]
        self.clients = [(transform(each.inputs), each.targets) for each in examples]
        self.test = transform(task.data.test.inputs), task.data.test.targets
        self.start = parameters_to_vector(self.model.parameters()).detach().clone()

    def gradient(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        vector_to_parameters(theta, self.model.parameters())
        loss = cross_entropy(self.model(inputs), targets)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(self.model.parameters()))])

    def gradients(self, theta: Tensor) -> Tensor:
        """Return the full gradient of each client."""
        return torch.stack([self.gradient(theta, *client) for client in self.clients])

    def accuracy(self, theta: Tensor) -> float:
        vector_to_parameters(theta, self.model.parameters())
        with torch.no_grad():
            return float((self.model(self.test[0]).argmax(1) == self.test[1]).float().mean())

    def train(self, theta: Tensor, rounds: int, controls: str) -> tuple[Tensor, list[float]]:
        """Train with "none", "stored" or "refreshed" control variates; return the model and the accuracies."""
        rng = np.random.default_rng(0)
        own = torch.zeros(len(self.clients), len(theta))
        accuracies = []
        for t in range(rounds):
            if controls == "refreshed" or (controls == "warm" and t == 0):
                own = self.gradients(theta)
            mean = own.mean(0)
            ends = []
            for number in rng.choice(len(self.clients), COHORT, replace=False):
                w, (inputs, targets) = theta.clone(), self.clients[number]
                order, seen = torch.from_numpy(rng.permutation(len(inputs))), []
                for batch in order.split(BATCH):
                    seen.append(self.gradient(w, inputs[batch], targets[batch]))
                    correction = mean - own[number] if controls != "none" else 0.0
                    w = w - LR * (seen[-1] + correction)
                if controls in ("stored", "warm"):
                    own[number] = torch.stack(seen).mean(0)
                ends.append(w)
            theta = torch.stack(ends).mean(0)
            if t >= rounds - LAST:
                accuracies.append(self.accuracy(theta))
        return theta, accuracies


def main(rounds: int) -> None:
    """Train every variant and write the result."""
    torch.manual_seed(0)
    study = Study()
    trained, fedavg = study.train(study.start, rounds, "none")
    rows = {"FedAvg": fedavg}
    for title, theta, controls in (
        ("SCAFFOLD", study.start, "stored"),
        ("SCAFFOLD, refreshed", study.start, "refreshed"),
        ("FedAvg, continued", trained, "none"),
        ("SCAFFOLD, warm start", trained, "warm"),
        ("SCAFFOLD, warm start, refreshed", trained, "refreshed"),
    ):
        rows[title] = study.train(theta, rounds, controls)[1]
        print(title, np.mean(rows[title]), flush=True)
    ratios = {}
    for title, theta in (("random model", study.start), ("trained by FedAvg", trained)):
        gradients = study.gradients(theta)
        ratios[title] = float(gradients.norm(dim=1).mean() / gradients.mean(0).norm())
    accuracies = {title: round(float(np.mean(values)), 4) for title, values in rows.items()}
    result = {"rounds": rounds, "last": LAST, "lr": LR, "accuracy": accuracies, "gradient_ratio": ratios}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 150)
