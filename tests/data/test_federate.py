"""Federated data from Python: arrays, Hugging Face data sets and flwr-datasets partitioners."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keel
from keel import Dataset, FederatedData, KeelError
from keel.core.examples import Examples
from keel.core.transforms import Identity
from keel.data.arrays import arrays
from keel.data.federate import federate, from_dataset, from_partitioner
from keel.data.partition import partition_dataset
from keel.data.transforms import Pixels

LABELS = [0, 1, 2] * 8
CLIENTS = [f"user{number % 4}" for number in range(24)]


class Columns:
    """Numpy columns with the interface of a datasets.Dataset."""

    def __init__(self, **columns: Any):
        self.columns = {name: np.asarray(values) for name, values in columns.items()}
        self.column_names = list(columns)

    def with_format(self, kind: str) -> "Columns":
        assert kind == "numpy"
        return self

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns[self.column_names[0]])


class ListPartitioner:
    """A partitioner of given parts, with the argument name of an old flwr-datasets release."""

    def __init__(self, *parts: Columns):
        self.parts, self.num_partitions = parts, len(parts)

    def load_partition(self, idx: int) -> Columns:
        return self.parts[idx]


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (24, *shape), dtype=np.uint8)


def train_one_round(data: FederatedData, out: Path) -> None:
    table = {"rounds": 1, "algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}, "participation": {"rate": 1.0}}
    assert keel.run(table, data=data, out=out).status == "finished"


def test_integer_arrays_stay_integers() -> None:
    data = federate(images(4), LABELS, test=(images(4), LABELS), keys=CLIENTS)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.inputs.max() > 200
    assert data.partition.clients == 4


def test_colour_images_stay_bytes_with_their_channels_first() -> None:
    colours = images(6, 5, 3)
    table = Columns(image=colours, label=LABELS, client=CLIENTS)
    data = from_dataset(table, input="image", label="label", client="client", test=table)
    assert data.train.inputs.dtype == torch.uint8
    assert data.input_shape == (3, 6, 5)
    assert data.transform == Pixels((0.0,) * 3, (1.0,) * 3)
    np.testing.assert_allclose(data.transform(data.train.inputs[:1])[0, 2], colours[0, :, :, 2] / 255, rtol=1e-6)
    assert data.partition[1].tolist() == [1, 5, 9, 13, 17, 21]


@pytest.mark.parametrize("inputs", [torch.ones(4, 2).bfloat16(), np.ones((4, 2), ">f4"), np.ones((4, 2), ">i4")])
def test_numbers_that_numpy_or_pytorch_lacks_are_converted(inputs: Any) -> None:
    labels = torch.tensor([0, 1, 0, 1]).bfloat16()
    data = federate(inputs, labels, test=(inputs, labels), clients=2, task="classification")
    assert data.train.inputs.float().tolist() == [[1.0, 1.0]] * 4
    assert data.train.targets.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.eye(4).to_sparse(), "data.inputs must be a dense tensor of numbers (TypeError: "),
        (torch.empty(4, 2, device="meta"), "data.inputs must be a dense tensor of numbers (NotImplementedError: "),
        (np.full((4, 2), 2**63, np.uint64), "data.inputs must be at most 9223372036854775807 (got 9223372036854775808"),
    ],
)
def test_numbers_that_cannot_be_stored_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(KeelError) as caught:
        federate(inputs, [0, 1, 0, 1], test=(np.ones((1, 2)), [0]), clients=2)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_array_in_an_error_is_one_line() -> None:
    with pytest.raises(KeelError) as caught:
        federate(np.ones((90, 1)), [0] * 90, test=(np.ones((1, 1)), [0]), clients=np.arange(90))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_grey_images_have_one_channel() -> None:
    table = Columns(image=images(6, 5), label=LABELS)
    data = from_dataset(table, input="image", label="label", test=table, clients=3)
    assert data.input_shape == (1, 6, 5)
    assert data.partition.sizes.tolist() == [8, 8, 8]


def test_columns_of_numbers_become_floats() -> None:
    table = Columns(x=np.arange(48.0).reshape(24, 2), label=LABELS)
    data = from_dataset(table, input="x", label="label", test=table, clients=6, alpha=0.0)
    assert data.transform == Identity()
    assert data.train.inputs[1].tolist() == [2, 3]
    assert all(len(set(data.client(client).targets.tolist())) == 1 for client in range(6))


@pytest.mark.parametrize(
    ("arguments", "scheme"),
    [
        ({"classes_per_client": 2}, "classes"),
        ({"shards_per_client": 3}, "shards"),
        ({"noise": 0.2}, "feature"),
        ({"alpha": 2.0, "partition": "dirichlet_per_class", "min_examples": 1}, "dirichlet_per_class"),
        ({"alpha": 2.0, "partition": "quantity", "min_examples": 1}, "quantity"),
        ({"partition": "shards"}, "shards"),
    ],
    ids=str,
)
def test_a_partitioning_scheme_is_named_or_implied(arguments: dict[str, Any], scheme: Any) -> None:
    inputs = np.arange(48.0).reshape(24, 2)
    data = federate(inputs, LABELS, test=(inputs, LABELS), clients=4, seed=5, **arguments)
    table = Columns(x=inputs, label=LABELS)
    same = from_dataset(table, input="x", label="label", test=table, clients=4, seed=5, **arguments)
    fields = {field: value for field, value in arguments.items() if field != "partition"}
    expected = partition_dataset("custom", keyless(inputs), 5, scheme, clients=4, **fields)
    for made in (data, same):
        assert made.partition.fingerprint() == expected.partition.fingerprint()
        assert torch.equal(made.train.inputs, expected.train.inputs)


def keyless(inputs: np.ndarray) -> Dataset:
    examples = Examples(torch.from_numpy(inputs).float(), torch.tensor(LABELS))
    return Dataset(examples, examples, 3)


def test_a_wrong_partitioning_scheme_is_refused() -> None:
    inputs = np.arange(48.0).reshape(24, 2)
    with pytest.raises(KeelError, match=r"unknown data\.partition 'shard'; did you mean 'shards'\?"):
        federate(inputs, LABELS, test=(inputs, LABELS), clients=4, partition="shard")  # type: ignore[arg-type]
    with pytest.raises(KeelError, match=r"data\.noise = 0\.1 requires data without keys; pass keys or noise, not both"):
        federate(inputs, LABELS, test=(inputs, LABELS), keys=CLIENTS, noise=0.1)
    with pytest.raises(KeelError, match=r"data\.alpha = 1\.0 requires data\.partition = .* \(got 'shards'\)"):
        federate(inputs, LABELS, test=(inputs, LABELS), clients=4, partition="shards", alpha=1.0)


def test_labels_that_are_text_become_classes_in_sorted_order() -> None:
    inputs, texts = np.arange(48.0).reshape(24, 2), [["sad", "glad", "calm"][label] for label in LABELS]
    data = federate(inputs, texts, test=(inputs[:1], np.array(["wild"], dtype=object)), clients=2)
    assert (data.classes, data.class_names) == (4, ("calm", "glad", "sad", "wild"))
    assert [data.class_names[label] for label in data.train.targets] == texts
    assert data.test.targets.tolist() == [3]
    table = Columns(x=inputs, label=texts)
    data = from_dataset(table, input="x", label="label", test=table, clients=2)
    assert data.class_names == ("calm", "glad", "sad")
    assert [data.class_names[label] for label in data.test.targets] == texts


def test_array_files_may_have_labels_that_are_text(tmp_path: Path) -> None:
    for name, array in ("x", np.zeros((3, 2))), ("y", np.array(["no", "yes", "no"])):
        np.save(tmp_path / f"{name}.npy", array)
    x, y = str(tmp_path / "x.npy"), str(tmp_path / "y.npy")
    dataset = arrays(inputs=x, labels=y, test_inputs=x, test_labels=y)
    assert (dataset.train.targets.tolist(), dataset.class_names) == ([0, 1, 0], ("no", "yes"))


def test_natural_clients_keep_their_names() -> None:
    inputs = np.arange(48.0).reshape(24, 2)
    data = federate(inputs, LABELS, test=(inputs, LABELS), keys=CLIENTS, clients=3, seed=1)
    assert data.client_names is not None
    for client, name in enumerate(data.client_names):
        assert {CLIENTS[row] for row in data.partition[client]} == {name}
    numbered = federate(inputs, LABELS, test=(inputs, LABELS), keys=np.arange(24) % 4)
    assert numbered.client_names is None  # the numbers of the clients are their names
    assert federate(inputs, LABELS, test=(inputs, LABELS), clients=3).client_names is None


def test_each_partition_is_a_client() -> None:
    table = Columns(x=np.arange(48.0).reshape(24, 2), label=LABELS)
    parts = ListPartitioner(*(Columns(x=np.full((size, 2), float(size)), label=LABELS[:size]) for size in (5, 1, 3)))
    data = from_partitioner(parts, input="x", label="label", test=table)
    assert data.partition.sizes.tolist() == [5, 1, 3]
    assert [data.client(client).inputs[0, 0] for client in range(3)] == [5, 1, 3]
    with pytest.raises(KeelError, match="partition 1 has no examples"):
        from_partitioner(ListPartitioner(table, Columns(x=[], label=[])), input="x", label="label", test=table)


def test_an_error_names_the_column() -> None:
    table = Columns(image=images(6, 5, 3), label=LABELS)
    with pytest.raises(KeelError, match="data has no column 'img'; its columns are image, label"):
        from_dataset(table, input="img", label="label", test=table, clients=2)
    with pytest.raises(
        KeelError, match=r"data.labels must be numbers, one row per example \(got <U5 of shape \(24,\)\)"
    ):
        from_dataset(Columns(image=images(6, 5, 3), label=CLIENTS), input="image", label="label", test=table, clients=2)
    uneven = np.empty(24, dtype=object)
    with pytest.raises(KeelError, match="column 'image' must have numbers of one shape and type"):
        from_dataset(Columns(image=uneven, label=LABELS), input="image", label="label", test=table, clients=2)
    floats = Columns(image=np.zeros((24, 3, 6, 5), dtype=np.float32), label=LABELS)
    with pytest.raises(KeelError, match="column 'image' must have numbers of one shape and type"):
        from_dataset(table, input="image", label="label", test=floats, clients=2)


def test_a_hugging_face_dataset_is_trained_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "x": datasets.Sequence(datasets.Value("float64")),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "client": datasets.Value("string"),
        }
    )
    colours, numbers = images(6, 5, 3), np.random.default_rng(1).normal(size=(24, 4))
    columns = {"image": list(map(image.fromarray, colours)), "x": numbers.tolist(), "label": LABELS, "client": CLIENTS}
    table = datasets.Dataset.from_dict(columns, features=features)
    data = from_dataset(table, input="image", label="label", client="client", test=table)
    np.testing.assert_array_equal(data.train.inputs, colours.transpose(0, 3, 1, 2))
    assert data.train.targets.tolist() == LABELS
    assert data.class_names == ("a", "b", "c")
    train_one_round(data, tmp_path / "images")
    floats = from_dataset(table, input="x", label="label", clients=3, alpha=0.5, test=table)
    np.testing.assert_allclose(floats.train.inputs, numbers, rtol=1e-6)
    train_one_round(floats, tmp_path / "numbers")


def test_partitions_of_flower_datasets_are_trained_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    numbers = np.random.default_rng(1).normal(size=(24, 4))
    table = datasets.Dataset.from_dict({"x": numbers.tolist(), "label": LABELS, "client": CLIENTS})
    for partitioner, sizes in (
        (partitioners.NaturalIdPartitioner("client"), [6, 6, 6, 6]),
        (partitioners.IidPartitioner(5), [5, 5, 5, 5, 4]),
    ):
        partitioner.dataset = table
        data = from_partitioner(partitioner, input="x", label="label", test=table)
        assert data.partition.sizes.tolist() == sizes
        np.testing.assert_allclose(data.client(1).inputs, partitioner.load_partition(1)["x"][:], rtol=1e-6)
        train_one_round(data, tmp_path / type(partitioner).__name__)


def test_an_object_that_is_not_a_dataset_is_refused() -> None:
    with pytest.raises(KeelError, match=r"data must be a datasets\.Dataset \(got dict\)"):
        from_dataset({"x": [1]}, input="x", label="y", test={"x": [1]})  # type: ignore[arg-type]
