"""The user's own arrays as federated data, in Python."""

import numpy as np
import torch
from numpy.typing import ArrayLike

from keel.data.arrays import examples
from keel.data.federated import FederatedData
from keel.data.partition import deal
from keel.randomness import draws


def federate(
    inputs: ArrayLike | torch.Tensor,
    labels: ArrayLike | torch.Tensor,
    *,
    test: tuple[ArrayLike | torch.Tensor, ArrayLike | torch.Tensor],
    keys: ArrayLike | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
    name: str = "custom",
) -> FederatedData:
    """Arrays as federated data: a client for each value of `keys`, or `clients` of them.

    With `clients`, `alpha` is the concentration of Dirichlet label mixes (0: one class per client); None is IID.
    """
    train = examples(_array(inputs), _array(labels), "data.")
    held_out = examples(_array(test[0]), _array(test[1]), "data.test_")
    partition = deal(
        train.targets.numpy(),
        draws(seed, "partition"),
        keys=None if keys is None else np.asarray(keys),
        clients=clients,
        alpha=alpha,
    )
    return FederatedData.of(name, train, held_out, partition)


def _array(values: ArrayLike | torch.Tensor) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
