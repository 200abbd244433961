"""Data sets that are read lazily, and arrays of other types, through keel.federate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import keel
from keel import KeelError
from keel.core.stored_inputs import Items
from keel.data import lazy

RNG = np.random.default_rng(0)
INPUTS, LABELS = RNG.normal(size=(40, 3)).astype(np.float32), RNG.integers(0, 2, 40)


class Counting(Dataset[tuple[Tensor, int]]):
    """Counts the items that are read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.read += 1
        return torch.from_numpy(INPUTS[row]), int(LABELS[row])


class WithTargets(Counting):
    targets = LABELS.tolist()


def run(data: keel.FederatedData, model: nn.Module, out: Path, **arguments: Any) -> keel.Run:
    spec = {"rounds": 2, "local": {"epochs": 1, "batch": 4, "lr": 0.1}, "participation": {"rate": 0.5}}
    return keel.run({**spec, "engine": {"name": "serial"}}, model=model, data=data, out=out, **arguments)


def test_a_lazy_data_set_trains_as_its_arrays_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    arrays = keel.federate(INPUTS, LABELS, test=(INPUTS, LABELS), clients=4)
    items = keel.federate(Counting(), test=Counting(), clients=4)
    tensors = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    stacked = keel.federate(tensors, test=tensors, clients=4)
    runs = [run(data, model, tmp_path / str(n)) for n, data in enumerate((arrays, items, stacked))]
    assert len({ended.summary["model_sha256"] for ended in runs}) == 1
    assert len({ended.summary["accuracy"] for ended in runs}) == 1


def test_items_are_not_read_before_they_are_used() -> None:
    class Many(WithTargets):
        targets = LABELS.tolist() * 100

        def __len__(self) -> int:
            return 4000

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            return super().__getitem__(row % 40)

    dataset = Many()
    data = keel.federate(dataset, test=Counting(), clients=40)
    few = dataset.read
    assert few < 200
    assert isinstance(data.train.inputs, Items)
    data.client(0)
    assert dataset.read == few + 100


class Noisy(Counting):
    """Augments its items at random."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        item, label = super().__getitem__(row)
        return item + torch.randn(3), label


def test_random_items_give_equal_runs_whatever_the_workers_and_the_interruptions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    spec = {"rounds": 4, "local": {"epochs": 1, "batch": 4, "lr": 0.1}, "participation": {"rate": 0.5}}
    spec["evaluation"] = {"every": 1}

    def noisy() -> keel.FederatedData:
        return keel.federate(Noisy(), test=Noisy(), clients=8)

    whole = keel.run({**spec, "engine": {"name": "serial"}}, model=model, data=noisy(), out=tmp_path / "whole")
    for workers in (1, 2):
        other = keel.run(spec, model=model, data=noisy(), out=tmp_path / str(workers), workers=workers)
        assert other.records == whole.records
    stops = iter([False, True])
    part = keel.run(spec, model=model, data=noisy(), out=tmp_path / "part", stop=lambda: next(stops, True))
    assert keel.resume(part.path, model=model, data=noisy()).records == whole.records


def test_lazy_targets_are_treated_as_those_of_arrays(tmp_path: Path) -> None:
    texts = [(torch.from_numpy(row), "yes" if label else "no") for row, label in zip(INPUTS, LABELS, strict=True)]
    data = keel.federate(texts, test=texts, clients=4)
    assert data.class_names == ("no", "yes")
    assert data.train[np.arange(40)].targets.tolist() == LABELS.tolist()
    several = [(torch.from_numpy(row), np.array([label, 1, 0])) for row, label in zip(INPUTS, LABELS, strict=True)]
    labelled = keel.federate(several, test=several, clients=4)
    assert labelled.kind == "multilabel"
    run(labelled, nn.Linear(3, 3), tmp_path / "run", loss=nn.BCEWithLogitsLoss())


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(3)


class WithoutLength(Dataset[Tensor]):
    def __getitem__(self, row: int) -> Tensor:
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (Endless(), None, "data must be a map-style data set.*got Endless, which can only be iterated over"),
        (WithoutLength(), None, r"data must have a length \(got WithoutLength without __len__\)"),
        ((n for n in range(3)), None, "data must be a map-style data set.*got generator"),
        ((n for n in range(3)), LABELS, "data.inputs must be an array, or a data set with a length .*got generator"),
        (Counting(), LABELS, "labels must be left out if inputs is a data set"),
        ([(1, 2, 3)] * 4, None, r"item 0 must be a pair \(input, target\)"),
        ([[1.0], [1.0, 2.0]] * 20, LABELS, "data.inputs must have rows of equal shape"),
        ((INPUTS, INPUTS[:3]), LABELS, "all inputs must have one row per example"),
        (INPUTS, LABELS.astype(float), "labels are whole numbers stored as floats.*name the task"),
        (INPUTS, np.where(LABELS, np.nan, 0.5), "data.labels must be finite"),
    ],
    ids=["endless", "length", "generator", "generator2", "both", "triples", "ragged", "uneven", "floats", "nan"],
)
def test_data_that_cannot_be_used_are_refused_at_once(inputs: Any, labels: Any, message: str) -> None:
    test = inputs if labels is None else (INPUTS, LABELS)
    with pytest.raises(KeelError, match=message):
        keel.federate(inputs, labels, test=test, clients=2)


def test_test_inputs_of_another_kind_are_refused() -> None:
    with pytest.raises(KeelError, match=r"data.test_inputs must have the same parts as data.inputs"):
        keel.federate((INPUTS, INPUTS), LABELS, test=(INPUTS, LABELS), clients=2)
    with pytest.raises(KeelError, match=r"data.test_labels must be whole numbers for task = 'classification'"):
        keel.federate(INPUTS, LABELS, test=(INPUTS, LABELS + 0.5), clients=2)


@pytest.mark.parametrize(
    ("targets", "task", "classes"),
    [
        (LABELS, "classification", 2),
        (LABELS.astype(bool), "classification", 2),
        (INPUTS[:, 0], "regression", 0),
        (INPUTS, "regression", 0),
        (RNG.integers(0, 2, (40, 3)), "multilabel", 0),
        (RNG.integers(0, 9, (40, 3)) + 1, "sequence", 10),
    ],
)
def test_the_task_is_inferred_from_the_targets(targets: np.ndarray, task: str, classes: int) -> None:
    data = keel.federate(INPUTS, targets, test=(INPUTS, targets), clients=4)
    assert (data.kind, data.classes) == (task, classes)
    assert data.outputs == (classes or (1 if targets.ndim == 1 else 3))


def test_the_task_can_be_named() -> None:
    ages = RNG.integers(20, 90, 40)
    data = keel.federate(INPUTS, ages, test=(INPUTS, ages), clients=4, task="regression")
    assert data.train.targets.tolist() == ages.tolist()
    assert data.kind == "regression"


def test_memory_mapped_arrays_stay_in_their_files(tmp_path: Path) -> None:
    for dtype in (np.float32, np.uint8, np.float64):
        np.save(tmp_path / "inputs.npy", INPUTS.astype(dtype))
        mapped = np.load(tmp_path / "inputs.npy", mmap_mode="r")
        data = keel.federate(mapped, LABELS, test=(INPUTS.astype(dtype), LABELS), clients=4)
        assert np.shares_memory(data.train.inputs.numpy(), mapped)
        assert data.client(0).inputs.dtype == (torch.uint8 if dtype is np.uint8 else torch.float32)


class Table:
    """The parts of a datasets.Dataset that are used."""

    features = {"ids": None, "mask": None, "label": None}  # noqa: RUF012
    column_names = ["ids", "mask", "label"]  # noqa: RUF012

    def __init__(self) -> None:
        self.columns = {"ids": RNG.integers(0, 9, (40, 4)), "mask": np.ones((40, 4), dtype=int), "label": LABELS}

    def with_format(self, type: str, /) -> "Table":
        return self

    def __len__(self) -> int:
        return 40

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {n: c[key] for n, c in self.columns.items()}


def test_several_columns_of_a_hugging_face_data_set_are_inputs_by_name() -> None:
    data = keel.from_dataset(Table(), input=["ids", "mask"], label="label", test=Table(), clients=4)
    assert data.train.packing is not None
    assert [part.name for part in data.train.packing.parts] == ["ids", "mask"]


def test_rows_of_a_large_hugging_face_data_set_are_read_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    eager = keel.from_dataset(table, input="ids", label="label", test=table, clients=4)
    monkeypatch.setattr(lazy, "LARGE", 100)
    data = keel.from_dataset(table, input="ids", label="label", test=table, clients=4)
    assert isinstance(data.train.inputs, Items)
    assert torch.equal(data.client(1).inputs, eager.client(1).inputs)
