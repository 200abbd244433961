"""Data sets that users bring: "module:name" and entry points."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import KeelError, make_spec, registry
from keel.config.defaults import assignments, user_files
from keel.data import catalog
from keel.data.partition import partition_dataset
from tests.conftest import one_line_error

MODULE = '''
import numpy as np
import torch

import keel
from keel.data.catalog import CatalogEntry
from keel.settings import PathText


def clusters(*, examples: int = 60, keyed: bool = True, file: PathText | None = None):
    """Points around three centres."""
    labels = torch.arange(examples) % 3
    rows = keel.Examples(labels[:, None] + torch.linspace(0, 0.5, examples)[:, None], labels)
    return keel.Dataset(rows, rows, classes=3, keys=np.arange(examples) % 6 if keyed else None)


natural = CatalogEntry(clusters, natural=True)
single = CatalogEntry(clusters)
with_files = CatalogEntry(clusters, files=("clusters/*.csv",), address="https://example.org/clusters")
number = 3


def wrong():
    return {"train": 3}


def fails():
    raise RuntimeError("no such file\\nas that")


def wrong_keys():
    rows = keel.Examples(torch.zeros(4, 1), torch.zeros(4))
    return keel.Dataset(rows, rows, classes=1, keys=np.arange(3))
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module `brought`."""
    (tmp_path / "brought.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "brought", raising=False)
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "data"))
    return tmp_path


def data_spec(**fields: Any) -> Any:
    return make_spec({"data": fields}).data


def test_a_loader_is_found_by_module_and_name() -> None:
    spec = data_spec(name="brought:clusters", partition="key", examples=12)
    assert spec.settings == {"examples": 12}
    dataset = catalog.load(spec.name, spec.settings)
    assert len(dataset.train) == 12
    assert partition_dataset(spec.name, dataset, 0, "key").partition.clients == 6


def test_a_loader_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"keel.data": {"clusters": EntryPoint("clusters", "brought:clusters", "keel.data")}}
    monkeypatch.setattr(registry, "_registered", lambda group: points.get(group, {}))
    monkeypatch.syspath_prepend(Path.cwd())
    spec = data_spec(name="clusters", partition="iid", clients=4)
    assert len(catalog.load(spec.name, spec.settings).train) == 60


def test_an_entry_with_natural_clients_is_partitioned_by_key_by_default() -> None:
    assert data_spec(name="brought:natural").partition == "key"
    assert data_spec(name="brought:natural", alpha=0.5, clients=3).partition == "dirichlet"
    assert data_spec(name="brought:clusters", clients=3).partition == "dirichlet"


def test_a_path_setting_is_made_absolute(folder: Path) -> None:
    (folder / "points.csv").write_text("")
    assert data_spec(name="brought:natural", file="points.csv").settings == {"file": str(folder / "points.csv")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "brought:nothing"}, "data.name: cannot import 'brought:nothing'"),
        ({"name": "not_installed:load"}, "data.name: cannot import 'not_installed:load'"),
        ({"name": "brought:number"}, "data.name: 'brought:number' must be a function that returns a keel.Dataset"),
        ({"name": "brought:natural", "exampels": 3}, "did you mean 'examples'?"),
        ({"name": "brought:single", "partition": "key"}, "requires natural clients, which brought:single lacks"),
        ({"name": "brought:clusters"}, "clients"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_spec_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with one_line_error(message):
        data_spec(**fields)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("brought:wrong", "data.name: 'brought:wrong' must return a keel.Dataset (got dict)"),
        ("brought:fails", "data.name: 'brought:fails' failed (RuntimeError: no such file as that)"),
        ("brought:wrong_keys", "data.keys must hold one key per example: shape (4,) (got (3,))"),
        ("brought:with_files", "copy it there from https://example.org/clusters"),
        ("custom", "data.name = 'custom' requires data passed in Python: keel.run(..., data=...)"),
    ],
)
def test_a_loader_that_fails_is_reported_in_one_line(name: str, message: str) -> None:
    with one_line_error(message):
        catalog.load(name, {})


def test_partitioning_by_key_requires_the_loaded_data_to_have_keys() -> None:
    dataset = catalog.load("brought:clusters", {"keyed": False})
    with pytest.raises(KeelError, match=r"data\.partition = 'key' requires natural clients"):
        partition_dataset("brought:clusters", dataset, 0, "key")


def test_a_report_does_not_import_the_code_that_a_run_names() -> None:
    spec = make_spec({"data": {"name": "brought:natural", "examples": 12}, "algorithm": {"name": "fedavg"}})
    table = spec.model_dump(exclude_none=True)
    table["data"]["name"] = table["model"]["name"] = "not_installed:thing"
    assert user_files(table) == []
    assert "data.examples=12" in assignments(table)


def test_every_data_set_of_keel_has_a_title() -> None:
    for name in catalog.CATALOG:
        assert catalog.describe(name)["title"].endswith(".")


def test_a_data_set_of_a_module_can_be_inspected_on_the_command_line(keel: Any) -> None:
    shown = keel("data", "show", "brought:natural", "--set", "data.examples=12")
    assert shown.code == 0
    assert "6 clients with 2 examples each" in shown.out
    assert "brought:number" in keel("data", "show", "brought:number").err


def test_dataset_keys_must_match_the_rows_that_are_examples() -> None:
    dataset = catalog.load("digits", {})
    with pytest.raises(KeelError, match=r"data\.test_keys must hold one key per example"):
        type(dataset)(dataset.train, dataset.test, 10, test_keys=np.arange(3))
