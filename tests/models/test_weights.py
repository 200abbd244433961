"""`model.init`: weights from a file of plain tensors, and the lines about a file that does not fit."""

import pickle
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import keel
from keel.config.defaults import make_spec, user_files
from keel.core.flat_model import state_fingerprint
from keel.runs.build import make_task
from tests.conftest import one_line_error, small_network, uneven_data

SHORT: dict[str, Any] = {"rounds": 2, "evaluation": {"every": 1, "last": 1}}
CUSTOM: dict[str, Any] = {"data": {"name": "custom"}, "model": {"name": "custom"}}


def saved(tensors: Any, file: Path) -> str:
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)
    return str(file)


def start(module: nn.Module, init: str, **model: Any) -> nn.Module:
    """The module that training starts from."""
    spec = make_spec({**CUSTOM, "model": {"name": "custom", "init": init, **model}})
    return make_task(spec, module=module, data=uneven_data()).module


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_a_passed_model_starts_from_the_file_and_does_not_change(name: str, tmp_path: Path) -> None:
    passed, other = small_network(), small_network(seed=3)
    before = state_fingerprint(passed)
    init = saved(other.state_dict(), tmp_path / name)
    assert state_fingerprint(start(passed, init)) == state_fingerprint(other)
    assert state_fingerprint(passed) == before


def test_a_built_in_model_starts_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = keel.run({**SHORT, "seed": 1}, out="first")
    save_file(first.state_dict(), "weights.safetensors")
    spec = make_spec({**SHORT, "model": {"init": "weights.safetensors"}})
    assert spec.model.init == str(tmp_path / "weights.safetensors")
    assert user_files(spec.model_dump()) == [spec.model.init]
    assert state_fingerprint(make_task(spec).module) == state_fingerprint(first.module)


def test_a_model_of_the_user_starts_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "init_models.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(64, 10)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    other = nn.Linear(64, 10)
    saved(other.state_dict(), tmp_path / "w.pt")
    spec = make_spec({"model": {"name": "init_models:net", "init": "w.pt"}})
    assert state_fingerprint(make_task(spec).module) == state_fingerprint(other)


def test_a_run_is_resumed_to_the_same_bits_when_the_file_is_gone(tmp_path: Path) -> None:
    init = saved(small_network(seed=3).state_dict(), tmp_path / "weights.pt")
    table = {**SHORT, "rounds": 4, "algorithm": {"name": "fedhbm", "anchor": "shared_init"}, "model": {"init": init}}
    objects: dict[str, Any] = {"model": small_network(), "data": uneven_data()}
    whole = keel.run(table, out=tmp_path / "whole", **objects)
    stopped = keel.run(table, out=tmp_path / "stopped", stop=lambda: True, **objects)
    Path(init).unlink()
    assert keel.resume(stopped.path, **objects).summary["model_sha256"] == whole.summary["model_sha256"]
    with one_line_error("is not a file; use a .safetensors file or a saved state_dict"):
        keel.run(table, out=tmp_path / "again", **objects)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("buffers", ["average", "local", "group_norm"])
def test_the_model_of_a_run_with_batch_normalisation_can_be_the_start_of_another(buffers: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    table = {**SHORT, "model": {"buffers": buffers}, "local": {"drop_last": True, "batch": 2}}
    data = uneven_data(sizes=(4, 6, 8))
    first = keel.run(table, model=module, data=data, out=tmp_path / "first")
    init = saved(first.state_dict(), tmp_path / "weights.safetensors")
    second = {**table, "model": {"buffers": buffers, "init": init}, "rounds": 1}
    run = keel.run(second, model=module, data=data, out=tmp_path / "second", stop=lambda: True)
    assert keel.resume(run.path, model=module, data=data).status == "finished"
    initial = load_file(run.path / "initial.safetensors")
    assert all(torch.equal(initial[name], tensor) for name, tensor in first.state_dict().items())


def test_a_tied_parameter_needs_one_of_its_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    module[1].weight = module[0].weight
    tensors = {name: tensor + 1 for name, tensor in module.state_dict().items() if name != "1.weight"}
    started = start(module, saved(tensors, tmp_path / "weights.pt"))
    assert torch.equal(started.get_parameter("1.weight"), tensors["0.weight"])


def changed(**changes: Any) -> dict[str, Any]:
    """The tensors of the small network, some changed, or removed where the change is None."""
    tensors = {**small_network().state_dict(), **{name.replace("_", "."): value for name, value in changes.items()}}
    return {name: value for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(**{"0.bias": None}), "does not fit the model: it lacks 0.bias"),
        (changed(**{"9.bias": torch.ones(3)}), "does not fit the model: it has unexpected 9.bias"),
        ({f"layer.{i}": torch.ones(1) for i in range(5)}, "it lacks 0.weight, 0.bias, 2.weight and 1 more and it has "),
        (changed(**{"0.bias": torch.ones(7)}), "0.bias has the shape (7,), the model's has (4,)"),
        (
            changed(**{"0.bias": torch.ones(4, dtype=torch.int64)}),
            "0.bias is torch.int64, the model's is torch.float32",
        ),
        (changed(**{"2.bias": torch.tensor([1.0, float("nan"), 0.0])}), "has values that are not finite in 2.bias"),
        ({"epoch": 3, "state_dict": changed()}, "must hold tensors by name (got 'epoch' of type int); save model."),
        (torch.ones(3), "must hold a state_dict (got Tensor)"),
        (changed(**{"2.bias": torch.full([3], 1e300, dtype=torch.float64)}), "values that are not finite in 2.bias"),
        (changed(**{"0.bias": torch.ones(1).expand(10**6, 10**6)}), "0.bias has the shape (1000000, 1000000), the mod"),
        (changed(**{"0.bias": torch.ones(4).to_sparse()}), "must hold dense tensors (got '0.bias', which is sparse, "),
        (changed(**{"0.bias": torch.ones(4, device="meta")}), "must hold dense tensors (got '0.bias', which is "),
        ({**changed(), 1: torch.ones(1)}, "must hold tensors by name (got 1 of type Tensor)"),
        (small_network(), "is not a file of plain tensors; save it with torch.save(model.state_dict(), ...)"),
    ],
    ids=[
        "missing",
        "unexpected",
        "other names",
        "shape",
        "dtype",
        "nan",
        "checkpoint",
        "tensor",
        "large",
        "expanded",
        "sparse",
        "meta",
        "number",
        "module",
    ],
)
def test_a_file_that_does_not_fit_gives_one_line(content: Any, message: str, tmp_path: Path) -> None:
    file = saved(content, tmp_path / "weights.pt")
    with one_line_error(message):
        start(small_network(), file)


def test_code_in_a_file_is_never_executed(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Harmful()))
        with one_line_error(f"{name}' "):
            start(small_network(), str(tmp_path / name))
    assert not (tmp_path / "executed").exists()


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    file = Path(saved(changed(), tmp_path / "weights.pt"))
    with ZipFile(file) as source, ZipFile(tmp_path / "bomb.pt", "w", ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, bytes(2**20) if "/data/" in name else source.read(name))
    with one_line_error("bomb.pt' is not a file of plain tensors"):
        start(small_network(), str(tmp_path / "bomb.pt"))


def test_a_lazy_model_gives_one_line(tmp_path: Path) -> None:
    with one_line_error("lazy layers without shapes"):
        start(nn.LazyLinear(3), saved(nn.Linear(5, 3).state_dict(), tmp_path / "weights.pt"))
