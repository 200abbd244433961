"""Federated data from Python: arrays, Hugging Face data sets and flwr-datasets partitioners.

Neither package is imported: their objects are converted to numpy arrays.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike

from keel.core.examples import FederatedData, TaskKind
from keel.core.stored_inputs import Collate
from keel.data.arrays import make_dataset
from keel.data.dataset import Dataset
from keel.data.inputs import as_array
from keel.data.lazy import check_length, is_large, lazy_dataset, rows_dataset
from keel.data.partition import partition_dataset
from keel.data.schemes import IMPLIED, PartitionScheme, implied_by
from keel.data.targets import check_task
from keel.data.transforms import Pixels
from keel.errors import KeelError, unknown_name


class HuggingFaceDataset(Protocol):
    """The parts of a datasets.Dataset that are used."""

    column_names: Any

    def with_format(self, type: str, /) -> Any: ...


class Partitioner(Protocol):
    """The parts of a flwr-datasets partitioner that are used."""

    @property
    def num_partitions(self) -> int: ...

    def load_partition(self, partition_id: int, /) -> Any: ...


def federate(
    inputs: Any,
    labels: ArrayLike | torch.Tensor | None = None,
    *,
    test: Any,
    keys: ArrayLike | None = None,
    test_keys: ArrayLike | None = None,
    clients: int | None = None,
    partition: PartitionScheme | None = None,
    alpha: float | None = None,
    classes_per_client: int | None = None,
    shards_per_client: int | None = None,
    noise: float | None = None,
    min_examples: int | None = None,
    task: TaskKind | None = None,
    collate: Collate | None = None,
    seed: int = 0,
    name: str = "custom",
) -> FederatedData:
    """Make federated data from arrays, or from a map-style torch.utils.data.Dataset, whose items are read lazily.

    Args:
        inputs: One row per example: an array or tensor of numbers of any type, or a tuple or dict of them for a model
            with several inputs. Memory-mapped arrays stay so. Or a data set with items (input, target).
        labels: One target per example: a whole number from 0 or a text (a class), a float or several (numbers to
            predict), a row of 0 and 1 (labels that hold or do not), or a row of tokens, of which negative ones are
            padding. None if `inputs` is a data set.
        test: Inputs and labels of the test examples; or a data set.
        task: "classification", "regression", "multilabel" or "sequence", if it is not clear from the targets.
        collate: For data sets: makes a minibatch (inputs, targets) from a list of items, as DataLoader's collate_fn
            does; it may pad items of different lengths.
        keys: The client of each example. Without keys, examples are assigned to clients at random.
        test_keys: The client of each test example, if the test examples belong to the clients that train.
        clients: The number of clients; with `keys`, that many of them are drawn (default: all).
        partition: The partitioning scheme, as `data.partition` in a spec: "dirichlet", "dirichlet_per_class",
            "classes", "shards", "quantity", "feature", "iid" or "key". By default "key" with keys; without keys the
            scheme of the first of the following arguments that is given; "iid" if none is.
        alpha: The concentration of Dirichlet distributions. With "dirichlet", which it implies, the total concentration
            of a client's label distribution: 0 is one class per client. With "dirichlet_per_class", the convention of
            most other code, the concentration per class of the distribution over the clients: with 10 classes, 0.1
            there is about as heterogeneous as 1 in "dirichlet". With "quantity", that of the client sizes.
        classes_per_client: The number of classes of each client; implies "classes".
        shards_per_client: The number of shards of each client (default: 2); implies "shards".
        noise: The variance of the noise on the inputs of the last client; implies "feature".
        min_examples: With "key", clients with fewer examples are left out; with "dirichlet_per_class" and "quantity",
            the partition is drawn again until every client has as many (default: 10).
        seed: The seed of the partition.
        name: The name in reports.
    """
    check_task(task)
    owners = None if keys is None else np.atleast_1d(np.asarray(keys))
    if labels is None:
        _check_items(inputs, test)
        dataset = lazy_dataset(inputs, test, owners, task, collate)
    else:
        _check_arguments(inputs, test, collate)
        train_labels, test_labels = as_array(labels, "data.labels"), as_array(test[1], "data.test_labels")
        dataset = make_dataset((inputs, train_labels), (test[0], test_labels), owners, task)
    if test_keys is not None:
        dataset = replace(dataset, test_keys=np.atleast_1d(np.asarray(test_keys)))
    fields = _fields(alpha, classes_per_client, shards_per_client, noise, min_examples)
    return _partition(name, dataset, clients, partition, fields, seed)


def _check_items(inputs: Any, test: Any) -> None:
    """Raise a KeelError unless the arguments are those for data sets."""
    if hasattr(inputs, "column_names"):
        raise KeelError("data: use keel.from_dataset for a datasets.Dataset, which names its columns")
    if isinstance(test, tuple) and len(test) == 2 and hasattr(test[0], "shape"):
        raise KeelError("test must be a data set with items (input, target), as the training data are (got arrays)")


def _check_arguments(inputs: Any, test: Any, collate: Any) -> None:
    """Raise a KeelError unless the arguments are those for arrays."""
    if isinstance(inputs, torch.utils.data.Dataset):
        raise KeelError("labels must be left out if inputs is a data set, whose items are pairs (input, target)")
    if not (isinstance(test, tuple | list) and len(test) == 2):
        raise KeelError(f"test must be a pair of inputs and labels (got {type(test).__name__})")
    if collate is not None:
        raise KeelError("collate requires a data set instead of arrays; pad the arrays, or pass a data set")


def from_dataset(
    train: HuggingFaceDataset,
    *,
    input: str | Sequence[str],
    label: str,
    test: HuggingFaceDataset,
    client: str | None = None,
    clients: int | None = None,
    partition: PartitionScheme | None = None,
    alpha: float | None = None,
    classes_per_client: int | None = None,
    shards_per_client: int | None = None,
    noise: float | None = None,
    min_examples: int | None = None,
    task: TaskKind | None = None,
    seed: int = 0,
    name: str = "custom",
) -> FederatedData:
    """Make federated data from a Hugging Face datasets.Dataset.

    Args:
        train: The training rows.
        input: The column of the inputs; several columns are passed to the model by name. Images stay bytes until a
            batch is trained on. Data of 256 MB and more stay in their files, and rows are read when they are used.
        label: The column of the labels: whole numbers from 0, or texts. The names of a ClassLabel are kept.
        test: The test rows.
        client: The column of natural clients, if there is one.
        clients, partition, alpha, classes_per_client, shards_per_client, noise, min_examples, task, seed, name: As in
            `federate`.
    """
    check_task(task)
    for field, part in ("data", train), ("data.test", test):
        check_length(part, field)
    keys = None if client is None else _column(train, client)
    fields = _fields(alpha, classes_per_client, shards_per_client, noise, min_examples)
    if is_large(train, [input] if isinstance(input, str) else input):
        dataset = rows_dataset(train, test, input, label, keys, task, _class_label_names(train, label))
    elif not isinstance(input, str):
        dataset = _several_columns(train, test, input, label, keys, task)
    else:
        dataset = _convert([train], test, input, label, keys, task)
    return _partition(name, dataset, clients, partition, fields, seed)


def from_partitioner(
    partitioner: Partitioner, *, input: str, label: str, test: HuggingFaceDataset, name: str = "custom"
) -> FederatedData:
    """Make federated data from a flwr-datasets partitioner: one client per partition."""
    parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    sizes = [len(part) for part in parts]
    if 0 in sizes:
        raise KeelError(f"data: partition {sizes.index(0)} has no examples; every partition needs at least one")
    keys = np.repeat(np.arange(len(parts)), sizes)
    return _partition(name, _convert(parts, test, input, label, keys), None, "key", {}, 0)


def _fields(
    alpha: float | None,
    classes_per_client: int | None,
    shards_per_client: int | None,
    noise: float | None,
    min_examples: int | None,
) -> dict[str, Any]:
    """Return the fields of the partitioning schemes by name."""
    return {
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "shards_per_client": shards_per_client,
        "noise": noise,
        "min_examples": min_examples,
    }


def _partition(
    name: str,
    dataset: Dataset,
    clients: int | None,
    scheme: PartitionScheme | None,
    fields: dict[str, Any],
    seed: int,
) -> FederatedData:
    if scheme is None:
        given = [field for field in IMPLIED if fields.get(field) is not None]
        if dataset.keys is not None and given:
            raise KeelError(
                f"data.{given[0]} = {fields[given[0]]} requires data without keys; pass keys or {given[0]}, not both"
            )
        scheme = "key" if dataset.keys is not None else implied_by(fields) or "iid"
    elif scheme not in get_args(PartitionScheme):
        raise unknown_name("data.partition", scheme, get_args(PartitionScheme))
    return partition_dataset(name, dataset, seed, scheme, clients=clients, **fields)


def _convert(
    parts: Sequence[HuggingFaceDataset],
    test: HuggingFaceDataset,
    input: str,
    label: str,
    keys: np.ndarray | None,
    task: TaskKind | None = None,
) -> Dataset:
    """Concatenate the parts to one data set; images get a transform that scales them to [0, 1]."""
    inputs = [_inputs(part, input) for part in [*parts, test]]
    if len({(array.shape[1:], array.dtype == np.uint8) for array in inputs}) > 1:
        raise _not_uniform(input)
    labels = np.concatenate([_column(part, label) for part in parts])
    dataset = make_dataset(
        (np.concatenate(inputs[:-1]), labels),
        (inputs[-1], _column(test, label)),
        keys,
        task,
        _class_label_names(parts[0], label),
    )
    if dataset.train.inputs.dtype != torch.uint8 or dataset.train.inputs.dim() != 4:
        return dataset
    channels = dataset.train.inputs.shape[1]
    return replace(dataset, transform=Pixels((0.0,) * channels, (1.0,) * channels))


def _several_columns(
    train: HuggingFaceDataset,
    test: HuggingFaceDataset,
    columns: Sequence[str],
    label: str,
    keys: np.ndarray | None,
    task: TaskKind | None,
) -> Dataset:
    """Make a data set whose inputs are several columns."""
    inputs, test_inputs = ({name: _column(part, name) for name in columns} for part in (train, test))
    names = _class_label_names(train, label)
    return make_dataset((inputs, _column(train, label)), (test_inputs, _column(test, label)), keys, task, names)


def _class_label_names(dataset: HuggingFaceDataset, column: str) -> Sequence[str]:
    """Return the names of a column of the type ClassLabel."""
    features = getattr(dataset, "features", None) or {}
    return getattr(features.get(column), "names", None) or ()


def _inputs(dataset: HuggingFaceDataset, column: str) -> np.ndarray:
    """Return a column of inputs; images with the channels first."""
    values = _column(dataset, column)
    if values.dtype == object:
        raise _not_uniform(column)
    if values.dtype == np.uint8 and values.ndim == 3:
        return values[:, None]
    return values.transpose(0, 3, 1, 2) if values.dtype == np.uint8 and values.ndim == 4 else values


def _column(dataset: HuggingFaceDataset, name: str) -> np.ndarray:
    if not (hasattr(dataset, "column_names") and hasattr(dataset, "with_format")):
        raise KeelError(f"data must be a datasets.Dataset (got {type(dataset).__name__}); for arrays use keel.federate")
    if name not in dataset.column_names:
        raise KeelError(f"data has no column {name!r}; its columns are {', '.join(dataset.column_names)}")
    return np.asarray(dataset.with_format("numpy")[name][:])


def _not_uniform(column: str) -> KeelError:
    return KeelError(
        f"data: column {column!r} must have numbers of one shape and type; "
        "resize images and make them all grey or all colour"
    )
