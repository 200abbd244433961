"""Trained models leave Keel: keel.load, keel export, and files that PyTorch and transformers load."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import keel as keel_api
from keel.core.examples import Examples, FederatedData, Partition
from keel.runs.export import export
from keel.runs.folder import RunFolder
from tests.conftest import Called, one_line_error, small_network, uneven_data

Keel = Callable[..., Called]
SHORT: dict[str, Any] = {"rounds": 3, "evaluation": {"every": 1, "last": 1}}


class Mixed(nn.Module):
    """Tied and frozen parameters, BatchNorm, and a buffer that training does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.second(self.first(inputs)))) * self.scale


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> keel_api.Run:
    return keel_api.run({**SHORT, "algorithm": {"name": "fedhbm"}}, out=tmp_path_factory.mktemp("digits") / "run")


@pytest.fixture(scope="module", params=["average", "local", "group_norm"])
def passed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> keel_api.Run:
    """A run whose model was passed in Python."""
    table = {**SHORT, "model": {"buffers": request.param}, "local": {"batch": 2, "drop_last": True}}
    data, out = uneven_data(sizes=(4, 6, 8)), tmp_path_factory.mktemp(request.param) / "run"
    return keel_api.run(table, model=mixed(), data=data, out=out)


def equal(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return list(one) == list(two) and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_loaded_run_is_the_run_that_was_returned(digits: keel_api.Run) -> None:
    loaded = keel_api.load(digits.path)
    assert (loaded.path, loaded.status, loaded.summary) == (digits.path, "finished", digits.summary)
    assert (loaded.accuracy, loaded.records) == (digits.accuracy, digits.records)
    assert loaded.spec.algorithm.name == "fedhbm"
    assert not loaded.module.training
    assert equal(dict(loaded.module.state_dict()), dict(digits.module.state_dict()))


def test_the_module_of_a_loaded_run_needs_no_data(digits: keel_api.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.data.catalog.load", lambda *_: pytest.fail("loads the data"))
    assert isinstance(keel_api.load(digits.path).module, nn.Sequential)


def test_the_tensors_of_any_model_are_read_without_its_class(passed: keel_api.Run) -> None:
    state = keel_api.load(passed.path).state_dict()
    assert equal(state, dict(passed.module.state_dict()))
    assert torch.equal(state["second.weight"], state["first.weight"])


def test_a_model_that_was_passed_in_python_is_passed_to_load(passed: keel_api.Run) -> None:
    run = keel_api.load(passed.path)
    with one_line_error("the model of this run was passed in Python; use keel.load("):
        _ = run.module
    model = mixed()
    loaded = keel_api.load(passed.path, model=model).module
    inputs = uneven_data().test.inputs
    with torch.no_grad():
        assert torch.equal(loaded(inputs), passed.module(inputs))
    assert equal(dict(model.state_dict()), dict(mixed().state_dict()))  # it was copied
    with one_line_error("do not fit the model: it lacks 0.weight"):
        keel_api.load(passed.path, model=small_network())


def test_a_run_that_was_killed_or_diverged_can_be_loaded(digits: keel_api.Run, tmp_path: Path) -> None:
    killed = Path(copytree(digits.path, tmp_path / "killed"))
    (killed / "summary.json").unlink()
    run = keel_api.load(killed)
    assert (run.status, run.accuracy, len(run.records)) == ("unfinished", None, 3)
    assert "unfinished" in run._repr_html_()
    with one_line_error("has not ended"):
        _ = run.summary
    diverged = keel_api.run({**SHORT, "local": {"lr": 1e30}}, out=tmp_path / "diverged")
    assert (keel_api.load(diverged.path).status, keel_api.load(diverged.path).accuracy) == ("diverged", None)
    with one_line_error("is not a run folder"):
        keel_api.load(tmp_path)


def test_a_folder_of_an_earlier_version_is_read_through_its_spec(
    digits: keel_api.Run, passed: keel_api.Run, tmp_path: Path
) -> None:
    for number, run in enumerate((digits, passed)):
        copytree(run.path, tmp_path / str(number))
        for name in ("model.json", "manifest.json"):
            (tmp_path / str(number) / name).unlink()
        environment = json.loads((tmp_path / str(number) / "environment.json").read_text())
        del environment["format"]
        (tmp_path / str(number) / "environment.json").write_text(json.dumps(environment))
    assert equal(keel_api.load(tmp_path / "0").state_dict(), digits.state_dict())
    with one_line_error("does not record the names of its tensors; use keel.resume("):
        keel_api.load(tmp_path / "1").state_dict()


def test_the_exported_file_loads_with_pytorch(keel: Keel, digits: keel_api.Run, tmp_path: Path) -> None:
    called = keel("export", digits.path, "-o", "out/model.safetensors", "--json")
    assert called.code == 0, called.err
    content, file = json.loads(called.out), tmp_path / "out/model.safetensors"
    assert content["files"] == ["out/model.safetensors", "out/model.md"]
    assert content["sha256"] == sha256(file.read_bytes()).hexdigest()
    digits.module.load_state_dict(load_file(file))
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() | {"keel": ""} == {
            "format": "pt", "keel": "", "algorithm": "FedHBM", "data": "digits", "model": "mlp", "rounds": "3",
            "seed": "0",
        }  # fmt: skip


def run_card(card: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> Any:
    """Execute the lines of a model card, and return the model that they load."""
    monkeypatch.chdir(card.parent)
    exec(card.read_text().split("```python\n")[1].split("```")[0], names)  # noqa: S102
    return names["model"]


def test_the_model_card_says_where_the_model_comes_from(
    digits: keel_api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(RunFolder.open(digits.path), tmp_path / "model.safetensors")
    card = exported.card.read_text()
    for part in ("digits (alpha = 0)", "FedHBM, `beta = ", "3 of 3, seed 0", "B down", "| accuracy (test", "torch 2"):
        assert part in card
    assert exported.sha256 in card
    assert str(tmp_path) not in card
    assert equal(dict(run_card(exported.card, monkeypatch).state_dict()), digits.state_dict())


def test_the_lines_of_the_card_load_a_model_that_was_passed_in_python(
    passed: keel_api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(RunFolder.open(passed.path), tmp_path / "mine.safetensors")
    assert exported.card.name == "mine.md"
    model = run_card(exported.card, monkeypatch, Mixed=lambda *_: mixed()).eval()
    inputs = uneven_data().test.inputs
    with torch.no_grad():
        assert torch.equal(model(inputs), passed.module(inputs))


MODELS = """
from torch import nn

def net(width=4):
    return nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10))

def shaped(input_shape, classes):
    return nn.Linear(*input_shape, classes)
"""


@pytest.mark.parametrize("name", ["net", "shaped"])
def test_the_lines_of_the_card_make_a_model_of_the_user(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exported_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    table = {**SHORT, "rounds": 1, "model": {"name": f"exported_models:{name}"}}
    run = keel_api.run(table, out=tmp_path / "run")
    exported = export(RunFolder.open(run.path), tmp_path / "model.safetensors")
    assert equal(dict(run_card(exported.card, monkeypatch).state_dict()), run.state_dict())
    assert equal(dict(keel_api.load(run.path).module.state_dict()), run.state_dict())


def test_an_existing_file_is_kept_without_force(keel: Keel, digits: keel_api.Run, tmp_path: Path) -> None:
    (tmp_path / "model.md").write_text("mine")
    called = keel("export", digits.path)
    assert (called.code, called.err.count("\n")) == (2, 1)
    assert "'model.md' exists; use another name, or overwrite it with --force" in called.err
    assert not (tmp_path / "model.safetensors").exists()
    assert keel("export", digits.path, "--force").out == "model after round 3: model.safetensors, model.md\n"
    assert "Load it" in (tmp_path / "model.md").read_text()


def test_a_run_without_a_finite_model_is_refused(keel: Keel, digits: keel_api.Run, tmp_path: Path) -> None:
    keel_api.run({**SHORT, "local": {"lr": 1e30}}, out=tmp_path / "diverged")
    copytree(digits.path, tmp_path / "ended")
    (tmp_path / "ended/checkpoint/state.safetensors").unlink()
    copytree(tmp_path / "ended", tmp_path / "started")
    (tmp_path / "started/summary.json").unlink()
    for run, message in (
        ("diverged", "'diverged' diverged, so that it has no model to export"),
        ("ended", "'ended/checkpoint/state.safetensors' is damaged (it is missing)"),
        ("started", "'started' has no checkpoint yet"),
        ("nothing", "'nothing' is not a run folder"),
    ):
        called = keel("export", run)
        assert (called.code, called.err.count("\n")) == (2, 1)
        assert message in called.err
    assert "--out must end in .safetensors (got 'model.bin')" in keel("export", "ended", "-o", "model.bin").err
    assert list(tmp_path.glob("model*")) == []


def test_resume_on_the_command_line_lists_all_that_was_passed(keel: Keel, tmp_path: Path) -> None:
    @keel_api.hyperparameters
    class Local(keel_api.Algorithm):
        name, title, paper = "local", "Local", "none"

    objects: dict[str, Any] = {"model": small_network(), "data": uneven_data(), "algorithm": Local()}
    run = keel_api.run(SHORT, out=tmp_path / "run", stop=lambda: True, **objects)
    call = "keel.resume('run', model=..., data=..., algorithm=...)"
    called = keel("resume", "run")
    assert (called.code, called.err.count("\n")) == (2, 1)
    assert f"pass model, data and algorithm again, with {call}" in called.err
    with one_line_error("the algorithm of this run was passed in Python"):
        _ = run.spec
    assert export(RunFolder.open(run.path), tmp_path / "model.safetensors").round == 1


def test_a_network_of_transformers_is_exported_with_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="requires the extra 'vision'")

    class Tiny(transformers.ViTForImageClassification):  # type: ignore[name-defined, misc]
        def forward(self, images: torch.Tensor) -> Any:
            return super().forward(images).logits

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    rng = torch.Generator().manual_seed(0)
    images = Examples(torch.randn(24, 1, 8, 8, generator=rng), torch.arange(24) % 3)
    rows = torch.arange(24).numpy()
    data = FederatedData("images", images, images, Partition.of([rows[:12], rows[12:]]), 3)
    run = keel_api.run({**SHORT, "rounds": 1}, model=Tiny(config), data=data, out=tmp_path / "run")

    exported = export(RunFolder.open(run.path), tmp_path / "out/model.safetensors")
    assert exported.config == tmp_path / "out/config.json"
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(images.inputs).logits, run.module(images.inputs))
    assert equal(dict(run_card(exported.card, monkeypatch).state_dict()), run.state_dict())
    other = export(RunFolder.open(run.path), tmp_path / "other/tiny.safetensors")
    assert equal(dict(run_card(other.card, monkeypatch).state_dict()), run.state_dict())


def test_the_vision_models_are_exported_with_the_names_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="requires the extra 'vision'")
    from keel.models.vision import Logits

    config = transformers.MobileNetV2Config(num_labels=3, depth_multiplier=0.1, image_size=32, num_channels=1)
    model = Logits(transformers.MobileNetV2ForImageClassification(config))
    images = Examples(torch.randn(8, 1, 32, 32), torch.arange(8) % 3)
    rows = torch.arange(8).numpy()
    data = FederatedData("images", images, images, Partition.of([rows[:4], rows[4:]]), 3)
    table = {"rounds": 1, "model": {"buffers": "average"}, "local": {"batch": 4}}
    run = keel_api.run(table, model=model, data=data, out=tmp_path / "run")
    export(RunFolder.open(run.path), tmp_path / "out/model.safetensors")
    loaded = transformers.MobileNetV2ForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images.inputs).logits, run.module(images.inputs), atol=1e-3, rtol=1e-3)
    again = {**table, "model": {"buffers": "average", "init": str(tmp_path / "out/model.safetensors")}}
    assert keel_api.run(again, model=model, data=data, out=tmp_path / "again").status == "finished"
