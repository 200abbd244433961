"""A round's cohort: who takes part, in which order, with which weights, and what all of them know."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from keel.algorithms.base import Context
from keel.core.examples import Partition
from keel.core.sampling import Sampler
from keel.core.schedules import LearningRate
from keel.core.weights import capped
from keel.errors import KeelError


@dataclass
class Participation:
    """Cohorts of a sampler over the clients of a partition."""

    sampler: Sampler
    partition: Partition
    weighting: Literal["examples", "uniform"]
    """Whether the mean over a cohort is weighted by each client's number of examples."""
    local_lr: LearningRate
    server_lr: LearningRate
    sizes: tuple[int, ...] = ()
    """The number of elements of each of the model's parameter tensors."""
    largest_weight: float = 1.0
    """The cap on a client's share in the mean."""
    fixed_cohort: bool = False
    """Whether algorithms see the expected cohort size in the place of the real one."""

    def __post_init__(self) -> None:
        if self.sampler.clients != self.partition.clients:
            raise KeelError(
                f"sampler.clients must be the number of clients of the data, {self.partition.clients} "
                f"(got {self.sampler.clients})"
            )

    @property
    def all_clients(self) -> np.ndarray:
        return self._ordered(np.arange(self.sampler.clients))

    def cohort(self, t: int) -> np.ndarray:
        """The cohort of round t in the order of aggregation."""
        cohort = np.asarray(self.sampler.cohort(t))
        if cohort.ndim == 1 and not len(cohort) and getattr(self.sampler, "may_be_empty", False):
            return cohort.astype(np.int64)
        numbers = cohort.ndim == 1 and np.issubdtype(cohort.dtype, np.integer) and len(cohort) > 0
        if (
            not numbers
            or cohort.min() < 0
            or cohort.max() >= self.sampler.clients
            or len(np.unique(cohort)) < len(cohort)
        ):
            raise KeelError(
                f"sampler.cohort({t}) must be distinct numbers from 0 to {self.sampler.clients - 1} (got {cohort})"
            )
        return self._ordered(cohort)

    def weights(self, cohort: np.ndarray) -> list[float]:
        """Each client's share in the mean; they sum to one, and none exceeds the cap unless the cohort is too small."""
        if not len(cohort):
            return []
        if self.weighting == "uniform":
            return [1 / len(cohort)] * len(cohort)
        sizes = self.partition.sizes_of(cohort)
        return capped((sizes / sizes.sum()).tolist(), self.largest_weight)

    def context(self, t: int, cohort: np.ndarray) -> Context:
        size: float = self.sampler.clients / self.sampler.period if self.fixed_cohort else len(cohort)
        share = size / self.sampler.clients
        if self.weighting == "examples":
            share = self.partition.sizes_of(cohort).sum().item() / self._examples
        return Context(
            round=t,
            clients=self.sampler.clients,
            cohort=max(1, round(size)),
            share=share,
            period=self.sampler.period,
            lr=self.local_lr(t),
            server_lr=self.server_lr(t),
            sizes=self.sizes,
        )

    @cached_property
    def _examples(self) -> int:
        return int(self.partition.sizes.sum())

    def _ordered(self, cohort: np.ndarray) -> np.ndarray:
        """Most examples first, so that no core waits for a long client at the end of a round."""
        return cohort[np.argsort(-self.partition.sizes_of(cohort), kind="stable")]
