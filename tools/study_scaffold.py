"""SCAFFOLD below FedAvg on CIFAR-10 at 16x16: a property of the method, or an error in Keel?

    python tools/study_scaffold.py [ROUNDS]     adds what is missing to results/scaffold.json

Keel's FedAvg and SCAFFOLD are run at several learning rates, and at one of them also in a second implementation: a
plain loop that shares no code with Keel's algorithms. In the loop, the control variates of the clients are those of
their last rounds, as published ("stored"), or computed anew at the server's model in every round ("refreshed").
Training starts from a random model, or from one that FedAvg has trained, with all control variates computed there
("warm start").
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import keel
from keel.config.defaults import make_spec
from keel.runs.build import make_task

RESULT = Path(__file__).parents[1] / "results/scaffold.json"
SEEDS = (0, 1, 2)
RATES = (0.003, 0.01, 0.03, 0.1)
RATE = 0.03
"""The learning rate of the second implementation."""
LAST = 20
"""The number of final rounds over which an accuracy is averaged."""
BATCH, COHORT = 64, 10
VARIANTS = (
    ("SCAFFOLD, stored", False, "stored"),
    ("FedAvg, continued", True, "none"),
    ("SCAFFOLD, stored, warm start", True, "warm"),
    ("SCAFFOLD, refreshed", False, "refreshed"),
    ("SCAFFOLD, refreshed, warm start", True, "refreshed"),
)
"""The second implementation's runs: their title, whether they start warm, and their control variates."""


def settings(seed: int, rate: float = RATE) -> dict[str, Any]:
    """Return the spec of a run without its algorithm."""
    return {
        "seed": seed,
        "data": {"name": "cifar10", "size": 16, "alpha": 0.0, "augment": False},
        "model": {"name": "cnn"},
        "local": {"lr": rate, "batch": BATCH, "weight_decay": 0.0},
    }


class SecondImplementation:
    """The clients' data and the model, trained by a plain loop."""

    def __init__(self, seed: int) -> None:
        task = make_task(make_spec({**settings(seed), "algorithm": {"name": "scaffold"}}))
        self.seed, self.model, transform = seed, task.module, task.data.transform
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

    def gradient_ratio(self, theta: Tensor) -> float:
        """Return the mean norm of the clients' gradients divided by the norm of their mean."""
        gradients = self.gradients(theta)
        return float(gradients.norm(dim=1).mean() / gradients.mean(0).norm())

    def accuracy(self, theta: Tensor) -> float:
        vector_to_parameters(theta, self.model.parameters())
        with torch.no_grad():
            return float((self.model(self.test[0]).argmax(1) == self.test[1]).float().mean())

    def accuracy_of(self, theta: Tensor, rounds: int, controls: str) -> float:
        return self.train(theta, rounds, controls)[1]

    def train(self, theta: Tensor, rounds: int, controls: str) -> tuple[Tensor, float]:
        """Train with the control variates "none", "stored", "warm" or "refreshed"; return model and accuracy."""
        rng = np.random.default_rng(self.seed)
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
                    w = w - RATE * (seen[-1] + correction)
                if controls in ("stored", "warm"):
                    own[number] = torch.stack(seen).mean(0)
                ends.append(w)
            theta = torch.stack(ends).mean(0)
            if t >= rounds - LAST:
                accuracies.append(self.accuracy(theta))
        return theta, fmean(accuracies)


def keel_accuracy(algorithm: str, rate: float, seed: int, rounds: int) -> float | None:
    """Return the accuracy of Keel's implementation; None if it diverged."""
    evaluation = {"every": 1, "last": LAST}
    spec = {**settings(seed, rate), "algorithm": {"name": algorithm}, "rounds": rounds, "evaluation": evaluation}
    with TemporaryDirectory() as folder:
        return keel.run(spec, out=Path(folder) / "run", workers=1).accuracy


class Study:
    """The stored results: accuracies and gradient ratios by title and seed. What is stored is not measured again."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.content: dict[str, Any] = {
            "rounds": rounds,
            "last": LAST,
            "rate": RATE,
            "accuracy": {},
            "gradient_ratio": {},
        }
        if RESULT.exists() and (stored := json.loads(RESULT.read_text(encoding="utf-8")))["rounds"] == rounds:
            self.content |= stored

    def add(self, table: str, title: str, seed: int, measure: Callable[[], float | None]) -> None:
        by_seed = self.content[table].setdefault(title, {})
        if str(seed) in by_seed:
            return
        value = measure()
        by_seed[str(seed)] = None if value is None else round(value, 4)
        print(title, seed, by_seed[str(seed)], flush=True)
        RESULT.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def main(rounds: int) -> None:
    """Train every variant with every seed, and write the result after each."""
    torch.set_num_threads(1)
    study = Study(rounds)
    for seed in SEEDS:
        for rate in RATES:
            for name in ("fedavg", "scaffold"):
                study.add("accuracy", f"Keel, {name}, {rate}", seed, partial(keel_accuracy, name, rate, seed, rounds))
    seconds = {seed: SecondImplementation(seed) for seed in SEEDS}
    trained = {}
    for seed, second in seconds.items():
        trained[seed], accuracy = second.train(second.start, rounds, "none")
        study.add("accuracy", "FedAvg", seed, partial(float, accuracy))
        for title, theta in (("random model", second.start), ("trained by FedAvg", trained[seed])):
            study.add("gradient_ratio", title, seed, partial(second.gradient_ratio, theta))
    for title, warm, controls in VARIANTS:
        for seed, second in seconds.items():
            theta = trained[seed] if warm else second.start
            study.add("accuracy", title, seed, partial(second.accuracy_of, theta, rounds, controls))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
