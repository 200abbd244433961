"""Models that users bring: "module:name" and entry points."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keel
from keel import make_spec, registry
from keel.models import build
from tests.conftest import one_line_error

MODULE = '''
import numpy as np
import torch
from torch import nn

import keel
from keel.settings import PathText


class Net(nn.Module):
    """A class whose settings are ordinary parameters."""

    def __init__(self, width=8, weights: PathText = ""):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)


def shaped(input_shape, classes, bias: bool = True):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), classes, bias=bias))


def any_settings(**settings):
    return nn.Linear(settings["inputs"], 10)


def required(width):
    return nn.Linear(64, width)


def wrong():
    return [nn.Linear(64, 10)]


def fails():
    raise RuntimeError("no weights\\nanywhere")


module = nn.Linear(64, 10)
number = 3


def points(*, examples: int = 40):
    labels = torch.arange(examples) % 10
    rows = keel.Examples(labels[:, None] + torch.linspace(0, 1, 64), labels)
    return keel.Dataset(rows, rows, classes=10)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module `brought`."""
    (tmp_path / "brought.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "brought", raising=False)
    return tmp_path


def test_a_class_is_called_with_its_settings_only() -> None:
    module = build("brought:Net", (64,), 10, {"width": 5})
    assert type(module).__name__ == "Net"
    assert module.layers[1].weight.shape == (5, 64)


def test_a_function_of_input_shape_and_classes_is_called_with_them() -> None:
    module = build("brought:shaped", (8, 4), 3, {"bias": False})
    assert [tuple(p.shape) for p in module.parameters()] == [(3, 32)]


def test_a_function_with_arbitrary_keywords_takes_any_setting() -> None:
    spec = make_spec({"model": {"name": "brought:any_settings", "inputs": 64}})
    assert build(spec.model.name, (64,), 10, spec.model.settings).in_features == 64


def test_a_class_of_torch_is_a_model() -> None:
    spec = make_spec({"model": {"name": "torch.nn:Linear", "in_features": 64, "out_features": 10}})
    assert isinstance(build(spec.model.name, (64,), 10, spec.model.settings), nn.Linear)


def test_a_model_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"keel.models": {"net": EntryPoint("net", "brought:Net", "keel.models")}}
    monkeypatch.setattr(registry, "_registered", lambda group: points.get(group, {}))
    monkeypatch.syspath_prepend(Path.cwd())
    assert make_spec({"model": {"name": "net", "width": 3}}).model.settings == {"width": 3}
    assert type(build("net", (64,), 10, {})).__name__ == "Net"


def test_a_path_setting_is_made_absolute(folder: Path) -> None:
    (folder / "weights.pt").write_text("")
    spec = make_spec({"model": {"name": "brought:Net", "weights": "weights.pt"}})
    assert spec.model.settings == {"weights": str(folder / "weights.pt")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "brought:Nut"}, "model.name: cannot import 'brought:Nut'"),
        ({"name": "not_installed:Net"}, "model.name: cannot import 'not_installed:Net'"),
        ({"name": "brought:module"}, "model.name: 'brought:module' must be a class or a function"),
        (
            {"name": "brought:number"},
            "model.name: 'brought:number' must be a subclass of torch.nn.Module or a function",
        ),
        ({"name": "brought:Net", "witdh": 3}, "did you mean 'width'?"),
        ({"name": "brought:required"}, "width"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_spec_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with one_line_error(message):
        make_spec({"model": fields})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("brought:wrong", "model.name: 'brought:wrong' must return a torch.nn.Module (got list)"),
        ("brought:fails", "model.name: 'brought:fails' failed (RuntimeError: no weights anywhere)"),
        ("custom", "model.name = 'custom' requires a model passed in Python: keel.run(..., model=...)"),
    ],
)
def test_a_model_that_cannot_be_made_is_reported_in_one_line(name: str, message: str) -> None:
    with one_line_error(message):
        build(name, (64,), 10, {})


@pytest.mark.parametrize("engine", ["serial", "cohort", "pool"])
def test_a_run_by_name_resumes_to_the_same_bits(engine: str, folder: Path) -> None:
    table = {
        "data": {"name": "brought:points", "clients": 10},
        "model": {"name": "brought:Net", "width": 6},
        "algorithm": {"name": "fedhbm"},
        "engine": {"name": engine},
        "rounds": 4,
    }
    whole = keel.run(table, out=folder / "whole")
    rounds: list[int] = []
    stopped = keel.run(
        table, out=folder / "stopped", hooks=[lambda *_: rounds.append(1)], stop=lambda: len(rounds) == 2
    )
    assert (stopped.status, len(rounds)) == ("interrupted", 2)
    resumed = keel.resume(folder / "stopped")
    assert resumed.status == "finished"
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert torch.equal(resumed.module.layers[1].weight, whole.module.layers[1].weight)


def test_a_model_is_named_on_the_command_line_and_names_the_run_folder(keel: Any, folder: Path) -> None:
    called = keel(
        "run", "--data", "brought:points", "--clients", "10", "--model", "brought:Net", "--rounds", "1", "--quiet"
    )
    assert called.code == 0, called.err
    (run,) = (folder / "runs").iterdir()
    assert run.name == "points-net-ghbm-seed0"
    assert keel("resume", run, "--quiet").code == 0
