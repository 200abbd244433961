"""Evaluation on each client's own held-out examples, of the server's model or of the client's personal one.

Some steps of fine-tuning may come first. The mean over clients says how a typical client fares, the worst decile how
unequal they are. All examples of a client are in one part of the work, so that its metric is computed where its
examples are. Personal models are evaluated where the client states are, which is the process of the server.
"""

import logging
from collections.abc import Callable
from math import ceil, isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.core.buffers import without_statistics
from keel.core.client import LocalTraining
from keel.core.client_tests import ClientTests
from keel.core.examples import ClientExamples
from keel.core.flat_model import FlatModel
from keel.core.measurement import measure_examples
from keel.core.randomness import keyed_rng
from keel.core.records import PrimaryMetric
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng

log = logging.getLogger(__name__)

COLUMNS = 2
"""What is measured of a client: the primary metric, NaN if it is not defined, and the number of examples."""


class ClientEvaluator:
    """Measures the primary metric of a task on the held-out examples of its clients."""

    def __init__(self, task: Task, tests: ClientTests, local: LocalTraining, local_buffers: bool = False):
        self.task, self.tests, self.local = task, tests, local
        self.model = (
            FlatModel(without_statistics(task.module)) if local_buffers else FlatModel(task.module, task.moving)
        )

    @property
    def personalised(self) -> bool:
        """Whether each client has a model of its own."""
        return self.local.algorithm.personalised

    def measure(self, part: int, model_of: Callable[[int], Tensor], buffers: Tensor | None) -> Tensor:
        """Return the metric and the number of examples of each client of a part, one after another.

        Args:
            model_of: The weights of the model that a client is evaluated with.
        """
        measured = []
        for client, rows in self.tests.of_part(part):
            self.model.weights.copy_(model_of(client))
            self.model.set_buffers(buffers)
            if self.tests.steps:
                self._fine_tune(client)
            with keyed_torch_rng(self.local.seed, "client evaluation", client):
                measured += [self._metric(rows), float(len(rows))]
        return torch.tensor(measured, dtype=torch.float64)

    def _fine_tune(self, client: int) -> None:
        """Take steps of the local optimiser on the client's training examples."""
        local, device = self.local, self.model.weights.device
        examples = ClientExamples(self.task.data.train, self.tests.training[client])
        self.model.module.train()
        rng = keyed_rng(local.seed, "fine-tuning", client)
        count = self.tests.steps
        epochs = [
            local.config.minibatches(len(examples), rng) for _ in range(ceil(count / local.config.count(len(examples))))
        ]
        weights = self.model.weights
        optimizer = local.optimizer.start(weights, local.optimizer.init_client(weights))
        with keyed_torch_rng(local.seed, "fine-tuning", client, device=device):
            for minibatch in [indices for epoch in epochs for indices in epoch][:count]:
                batch = examples[minibatch]
                outputs = self.model.outputs(local.transform(batch.inputs).to(device))
                loss = local.loss(outputs, batch.targets.to(device)).mean()
                optimizer.step(weights, self.model.gradient(loss), self.tests.lr)

    def _metric(self, rows: np.ndarray) -> float:
        """Return the primary metric on the client's held-out examples; NaN if it is not defined on them."""
        task, name = self.task, self.task.primary.name
        self.model.module.eval()
        chunks = [rows[first : first + self.local.chunk] for first in range(0, len(rows), self.local.chunk)]
        measured = [measure_examples(task, self.model, self.tests.examples[chunk]) for chunk in chunks]
        if name == "test_loss":
            return sum(chunk.loss for chunk in measured) / len(rows)
        for metric in task.metrics:
            if metric.name == name:
                try:
                    return metric.value([metric.state(chunk.predictions, chunk.targets) for chunk in measured])
                except Exception as error:  # such as a correlation of one example; mistakes show on all test examples
                    log.debug("metric %s is not defined for a client: %s", name, error)
                    return nan
        counted = sum(int(chunk.counted.sum()) for chunk in measured)
        return sum(len(chunk.correct) for chunk in measured) / counted if counted else nan


def summarize_clients(measured: Tensor, primary: PrimaryMetric) -> dict[str, Any]:
    """Return what a record holds of the clients' metrics.

    Args:
        measured: The metric and the number of examples of each client, one after another.
    """
    values, examples = measured.reshape(-1, COLUMNS).T.tolist()
    kept = sorted((value for value in values if isfinite(value)), reverse=primary.maximize)  # the best first
    tenth = max(1, round(len(kept) / 10))
    if not kept:
        return {"count": 0, "examples": int(sum(examples))}
    return {
        "count": len(kept),
        "examples": int(sum(n for value, n in zip(values, examples, strict=True) if isfinite(value))),
        "mean": float(np.mean(kept)),
        "std": float(np.std(kept)),
        "worst_decile": float(np.mean(kept[-tenth:])),
        "best_decile": float(np.mean(kept[:tenth])),
        "deciles": np.quantile(kept, np.linspace(0, 1, 11)).tolist(),
    }
