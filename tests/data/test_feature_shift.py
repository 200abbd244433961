"""Noise on the inputs of each client."""

from pathlib import Path

import numpy as np
import pytest
import torch

import keel
from keel import Dataset, KeelError
from keel.core.examples import Examples, FederatedData
from keel.core.transforms import Identity
from keel.data import feature_shift
from keel.data.inputs import convert_inputs
from keel.data.partition import partition_dataset
from keel.data.transforms import Pixels, Tokens


def numbers(examples: int = 2000, width: int = 50) -> Dataset:
    inputs = torch.from_numpy(np.random.default_rng(0).normal(size=(examples, width)).astype(np.float32))
    return Dataset(Examples(inputs, torch.arange(examples) % 4), Examples(inputs[:9], torch.arange(9) % 4), 4)


def shifted(dataset: Dataset, seed: int = 0, noise: float = 0.5) -> FederatedData:
    return partition_dataset("some", dataset, seed, "feature", clients=5, noise=noise)


def test_the_variance_of_the_noise_grows_from_client_to_client() -> None:
    dataset = numbers()
    data = shifted(dataset)
    for client in range(5):
        rows = data.partition[client]
        noise = data.train.inputs[rows] - dataset.train.inputs[rows]
        assert noise.var().item() == pytest.approx(0.5 * (client + 1) / 5, rel=0.05)
        assert abs(noise.mean().item()) < 0.02
    assert torch.equal(data.test.inputs, dataset.test.inputs)
    assert torch.equal(data.train.targets, dataset.train.targets)
    iid = partition_dataset("some", dataset, 0, "iid", clients=5)
    assert np.array_equal(data.partition.indices, iid.partition.indices)


def test_the_data_set_itself_is_not_changed_and_the_noise_is_a_function_of_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = numbers(200)
    before = dataset.train.inputs.clone()
    first = shifted(dataset)
    monkeypatch.setattr(feature_shift, "EXAMPLES_PER_STEP", 7)
    assert torch.equal(first.train.inputs, shifted(dataset).train.inputs)
    assert torch.equal(dataset.train.inputs, before)
    other = shifted(dataset, seed=1)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert len({first.fingerprint(), other.fingerprint(), shifted(dataset, noise=0.6).fingerprint()}) == 3


def test_a_run_with_feature_shift_has_the_same_bits_with_every_engine(tmp_path: Path) -> None:
    table = {"data": {"noise": 0.1, "clients": 10}, "rounds": 2, "participation": {"rate": 0.2}}
    models = [
        keel.run({**table, "engine": {"name": name}}, out=tmp_path / name).summary["model_sha256"]
        for name in ("serial", "pool")
    ]
    assert models[0] == models[1]


def test_several_inputs_are_refused() -> None:
    several = convert_inputs((np.zeros((20, 3)), np.zeros((20, 2))), "data.inputs")
    examples = Examples(several, torch.arange(20) % 2)
    with pytest.raises(KeelError, match=r"data\.partition = 'feature' requires one array of inputs"):
        shifted(Dataset(examples, examples, 2))


def test_noise_is_added_to_transformed_pixels() -> None:
    images = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    pixels = Pixels((0.5,), (0.25,))
    dataset = Dataset(Examples(images, torch.arange(60) % 2), Examples(images, torch.arange(60) % 2), 2)
    with pytest.raises(KeelError, match=r"'feature' requires inputs that are floats \(got torch.uint8\); use 'iid'"):
        shifted(dataset)
    with pytest.raises(KeelError, match=r"without random augmentation; set data\.augment = false"):
        shifted(Dataset(dataset.train, dataset.test, 2, transform=Pixels((0.5,), (0.25,), margin=2)))
    with pytest.raises(KeelError, match=r"requires inputs that are floats \(got torch.int64\)"):
        shifted(Dataset(dataset.train, dataset.test, 2, transform=Tokens()))
    data = shifted(Dataset(dataset.train, dataset.test, 2, transform=pixels), noise=1e-6)
    assert data.transform == Identity()
    torch.testing.assert_close(data.train.inputs, pixels(images), atol=0.01, rtol=0)
    assert torch.equal(data.test.inputs, pixels(images))
