"""Feature shift: Gaussian noise on the training inputs, with a variance that grows from client to client."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from keel.core.examples import Examples, Partition
from keel.core.transforms import Identity, Transform
from keel.data.dataset import Dataset
from keel.errors import KeelError

EXAMPLES_PER_STEP = 4096
"""The number of examples that are transformed, or get noise, in one step."""


def with_noise(dataset: Dataset, partition: Partition, noise: float, rng: np.random.Generator) -> Dataset:
    """Add Gaussian noise of variance noise * i / N to the inputs of client i = 1..N (Li et al., 2022).

    The noise is drawn once, so that an input is the same in every round. The result has the transformed inputs as
    floats, in memory: the noise is added to what the model takes. Test inputs get no noise.
    """
    _check_inputs(dataset)
    train = _transformed(dataset.train.inputs, dataset.transform)
    variance = noise * np.arange(1, partition.clients + 1) / partition.clients
    deviation = np.repeat(np.sqrt(variance).astype(np.float32), partition.sizes)
    for first in range(0, len(deviation), EXAMPLES_PER_STEP):
        step = slice(first, first + EXAMPLES_PER_STEP)
        rows = torch.from_numpy(partition.indices[step].astype(np.int64))
        drawn = torch.from_numpy(rng.standard_normal((len(rows), *train.shape[1:]), dtype=np.float32))
        scale = torch.from_numpy(deviation[step]).view(-1, *[1] * (train.ndim - 1))
        train[rows] += (drawn * scale).to(train.dtype)
    return replace(
        dataset,
        train=Examples(train, dataset.train.targets),
        test=Examples(_transformed(dataset.test.inputs, dataset.transform), dataset.test.targets),
        transform=Identity(),
        sha256=None,
    )


def _check_inputs(dataset: Dataset) -> None:
    if not isinstance(dataset.train.inputs, Tensor):
        raise KeelError("data.partition = 'feature' requires one array of inputs (got several, or items); use 'iid'")
    first = dataset.transform(dataset.train.inputs[:1])
    if not first.is_floating_point():
        raise KeelError(f"data.partition = 'feature' requires inputs that are floats (got {first.dtype}); use 'iid'")
    if dataset.transform.random:
        raise KeelError(
            "data.partition = 'feature' requires inputs without random augmentation; set data.augment = false"
        )


def _transformed(inputs: Tensor, transform: Transform) -> Tensor:
    """Return a transformed copy of all inputs."""
    first = transform(inputs[:1])
    dtype = torch.float32 if first.dtype == torch.float64 else first.dtype
    result = torch.empty((len(inputs), *first.shape[1:]), dtype=dtype)
    for start in range(0, len(inputs), EXAMPLES_PER_STEP):
        result[start : start + EXAMPLES_PER_STEP] = transform(inputs[start : start + EXAMPLES_PER_STEP])
    return result
