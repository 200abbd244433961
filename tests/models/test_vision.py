"""MobileNetV2 and ViT-B/16: initial weights, frozen parts, refused inputs."""

import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, linear, relu6

from keel import KeelError
from keel.core.flat_model import FlatModel
from keel.models import build
from keel.models.normalisation import group_norm

transformers = pytest.importorskip("transformers")

PUBLISHED = Path(os.environ.get("KEEL_DATA", "")) / "pretrained" / "mobilenet_v2-b0353104.pth"
BLOCKS = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
"""MobileNetV2's table: expansion, channels, repeats, stride of the first."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("a test tried to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def vit(folder: Path, classes: int = 3, shape: tuple[int, ...] = (3, 16, 16), **settings: Any) -> nn.Module:
    return build("vit_b16", shape, classes, {"pretrained": str(folder), **settings})


def layers() -> Iterator[tuple[str, str, tuple[int, int, int, int], int, bool]]:
    """torchvision's convolutions in order: name, name of the normalisation, shape, stride, whether ReLU6 follows."""
    yield "features.0.0", "features.0.1", (32, 3, 3, 3), 2, True
    inputs, block = 32, 0
    for expansion, channels, repeats, first_stride in BLOCKS:
        for repeat in range(repeats):
            block += 1
            wide, at, part = inputs * expansion, f"features.{block}.conv", 0
            if expansion != 1:
                yield f"{at}.0.0", f"{at}.0.1", (wide, inputs, 1, 1), 1, True
                part = 1
            yield f"{at}.{part}.0", f"{at}.{part}.1", (wide, 1, 3, 3), first_stride if repeat == 0 else 1, True
            yield f"{at}.{part + 1}", f"{at}.{part + 2}", (channels, wide, 1, 1), 1, False
            inputs = channels
    yield "features.18.0", "features.18.1", (1280, 320, 1, 1), 1, True


def random_checkpoint() -> dict[str, Tensor]:
    """Random weights with torchvision's names, shapes and order."""
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}
    for convolution, norm, shape, _, _ in layers():
        weights[f"{convolution}.weight"] = torch.randn(shape) * (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        weights[f"{norm}.weight"] = torch.rand(shape[0]) + 0.5
        weights[f"{norm}.bias"] = 0.1 * torch.randn(shape[0])
        weights[f"{norm}.running_mean"] = 0.1 * torch.randn(shape[0])
        weights[f"{norm}.running_var"] = torch.rand(shape[0]) * 1e-3  # small, so that epsilon shows
        weights[f"{norm}.num_batches_tracked"] = torch.tensor(9)
    weights["classifier.1.weight"] = torch.randn(1000, 1280) / 1280**0.5
    weights["classifier.1.bias"] = torch.randn(1000)
    return weights


def torchvision_mobilenet_v2(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """torchvision's forward pass in evaluation mode, with torchvision's names."""
    x = residual = images
    for convolution, norm, shape, stride, rectified in layers():
        if (shape[2] == 1 and rectified) or convolution == "features.1.conv.0.0":
            residual = x  # the first layer of a block
        groups = shape[0] if shape[1] == 1 else 1
        x = conv2d(x, weights[f"{convolution}.weight"], stride=stride, padding=shape[2] // 2, groups=groups)
        statistics = (weights[f"{norm}.{name}"] for name in ("running_mean", "running_var", "weight", "bias"))
        x = batch_norm(x, *statistics, eps=1e-5)
        if rectified:
            x = relu6(x)
        elif x.shape == residual.shape:
            x = x + residual
    return linear(x.mean((2, 3)), weights["classifier.1.weight"], weights["classifier.1.bias"])


@pytest.fixture(scope="module")
def random_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("torchvision") / "random.pth"
    torch.save(random_checkpoint(), file)
    return file


@pytest.mark.parametrize("origin", ["random", "published"])
def test_torchvisions_weights_give_torchvisions_outputs(origin: str, random_file: Path) -> None:
    file = random_file if origin == "random" else PUBLISHED
    if not file.is_file():
        pytest.skip("KEEL_DATA has no pretrained/mobilenet_v2-b0353104.pth")
    module = build("mobilenet_v2", (3, 75, 64), 1000, {"pretrained": str(file)}).eval()
    images = torch.randn(2, 3, 75, 64)
    with torch.no_grad():
        expected = torchvision_mobilenet_v2(torch.load(file, weights_only=True), images)
        torch.testing.assert_close(module(images), expected, rtol=1e-4, atol=1e-4)


def test_torchvisions_head_is_replaced_for_another_number_of_classes(random_file: Path) -> None:
    module = build("mobilenet_v2", (3, 64, 64), 12, {"pretrained": str(random_file)}).eval()
    assert module(torch.randn(1, 3, 64, 64)).shape == (1, 12)
    stem = module.get_parameter("network.mobilenet_v2.conv_stem.first_conv.convolution.weight")
    assert torch.equal(stem, random_checkpoint()["features.0.0.weight"])


def test_files_that_are_not_torchvision_checkpoints_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    weights = random_checkpoint()
    swapped = dict(zip(weights, reversed(weights.values()), strict=True))
    for content, words in [
        ({"a": torch.ones(2)}, "it has other weights"),
        (swapped, r"features.0.0.weight does not fit"),
        (print, "it is not a file of plain tensors"),
    ]:
        torch.save(content, file)
        with pytest.raises(KeelError, match=rf"model.pretrained: .*{words}\); it must be torchvision's checkpoint"):
            build("mobilenet_v2", (3, 64, 64), 12, {"pretrained": str(file)})


def test_pretrained_weights_are_loaded_and_a_new_head_depends_on_the_seed(tiny_vit: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(tiny_vit).state_dict()
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights = vit(tiny_vit).state_dict()
        heads.append(weights.pop("network.classifier.weight"))
        assert heads[-1].shape == (3, 8)
        assert weights.pop("network.classifier.bias").shape == (3,)
        assert len(weights) == len(saved) - 2
        for name, weight in weights.items():
            assert torch.equal(weight, saved[name.removeprefix("network.")])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_head_with_the_same_number_of_classes_is_kept(tiny_vit: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(tiny_vit)
    assert torch.equal(vit(tiny_vit, 7).get_parameter("network.classifier.weight"), saved.classifier.weight)


def test_weights_saved_in_half_precision_are_read_as_float32(tiny_vit: Path) -> None:
    transformers.ViTForImageClassification.from_pretrained(tiny_vit).half().save_pretrained(tiny_vit)
    assert FlatModel(vit(tiny_vit)).weights.dtype == torch.float32


def test_the_config_of_a_mobilenet_folder_is_used(tmp_path: Path) -> None:
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, num_labels=4)
    saved = transformers.MobileNetV2ForImageClassification(config).eval()
    saved.save_pretrained(tmp_path)
    module = build("mobilenet_v2", (3, 32, 32), 4, {"pretrained": str(tmp_path)}).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(module(images), saved(images).logits)


def test_transformers_prints_nothing(
    tiny_vit: Path, random_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = transformers.utils.logging
    before = library.is_progress_bar_enabled(), library.get_verbosity()
    logged: list[logging.LogRecord] = []  # its handler writes to the stderr of the test that imported it first
    monkeypatch.setattr(logging.Logger, "handle", lambda _, record: logged.append(record))
    capfd.readouterr()
    vit(tiny_vit)(torch.randn(2, 3, 16, 16))
    build("mobilenet_v2", (3, 64, 64), 3, {"pretrained": str(random_file)})(torch.randn(2, 3, 64, 64))
    assert capfd.readouterr() == ("", "")
    assert not logged
    assert before == (library.is_progress_bar_enabled(), library.get_verbosity())


def test_frozen_parts_are_not_trained(tiny_vit: Path) -> None:
    free = FlatModel(vit(tiny_vit))
    model = FlatModel(vit(tiny_vit, freeze=["vit.embeddings", "vit.layers.1"]))
    trained = [name for name in free.names if not name.startswith(("network.vit.embeddings.", "network.vit.layers.1."))]
    assert model.names == trained
    assert len(trained) < len(free.names)
    assert FlatModel(vit(tiny_vit, freeze=["vit"])).names == ["network.classifier.weight", "network.classifier.bias"]


@pytest.mark.parametrize("prefix", ["vit.layer", "vi", "", "network.vit"])
def test_a_name_to_freeze_without_parameters_is_refused(prefix: str, tiny_vit: Path) -> None:
    with pytest.raises(
        KeelError, match=f"model.freeze: '{prefix}' is not a module with parameters; use one of vit, classifier or"
    ):
        vit(tiny_vit, freeze=[prefix])


def test_mobilenet_with_group_normalisation_has_no_buffers(random_file: Path) -> None:
    module = build("mobilenet_v2", (3, 64, 64), 4, {"pretrained": str(random_file), "freeze": ["mobilenet_v2"]})
    grouped = group_norm(module)
    assert not list(grouped.buffers())
    assert FlatModel(grouped).names == ["network.classifier.weight", "network.classifier.bias"]
    assert grouped(torch.randn(2, 3, 64, 64)).isfinite().all()


def break_folder(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "missing":
        shutil.rmtree(folder)
    elif how == "pickle":
        weights.unlink()
        torch.save({}, folder / "pytorch_model.bin")
    elif how == "damaged":
        weights.write_bytes(b"not tensors")
    elif how == "config":
        config.write_text("{")
    elif how == "field":
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": "wide"}))
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 12}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "the folder does not exist"),
        ("pickle", "no file named model.safetensors"),
        ("damaged", "header"),
        ("config", "not a valid JSON file"),
        ("field", "hidden_size"),
        ("width", "it lacks this model's vit.embeddings.cls_token"),
    ],
)
def test_an_unreadable_folder_is_reported_in_one_line(how: str, words: str, tiny_vit: Path) -> None:
    break_folder(tiny_vit, how)
    with pytest.raises(KeelError, match=rf"^model.pretrained: .*{words}.*; it must be a folder .* \(owner/name\)$"):
        vit(tiny_vit)


def test_a_folder_of_another_model_is_refused(tiny_vit: Path) -> None:
    with pytest.raises(KeelError, match=r"it lacks this model's mobilenet_v2.*, or torchvision's checkpoint"):
        build("mobilenet_v2", (3, 16, 16), 3, {"pretrained": str(tiny_vit)})


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> NoReturn:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(KeelError, match=r"^model.pretrained: 'owner/name' .*the hub reports: no route\); it must be "):
        build("vit_b16", (3, 16, 16), 3, {"pretrained": "owner/name"})


def test_only_safetensors_are_downloaded_from_the_hub(tiny_vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        requests.append((name, allow_patterns))
        return str(tiny_vit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    vit(Path("owner/name"))
    ((name, patterns),) = requests
    assert name == "owner/name"
    assert all("safetensors" in pattern or pattern == "config.json" for pattern in patterns)


@pytest.mark.parametrize("text", ["./weights/vit", "/weights/vit", "weights", "pretrained/mobilenet.pth", "a/b/c"])
def test_a_path_is_not_searched_on_the_hub(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was used"))
    with pytest.raises(KeelError, match="the folder does not exist"):
        build("mobilenet_v2", (3, 16, 16), 3, {"pretrained": text})


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 16, 24), "requires images of 16x16 pixels .got 16x24."),
        ((1, 16, 16), "requires images of 3 channels .got 1."),
    ],
)
def test_images_of_another_size_than_the_pretrained_weights_are_refused(
    shape: tuple[int, ...], words: str, tiny_vit: Path
) -> None:
    with pytest.raises(KeelError, match=words):
        vit(tiny_vit, shape=shape)


def test_vit_requires_sides_divisible_by_the_patch_size() -> None:
    with pytest.raises(KeelError, match=r"divisible by 16 \(got 28x28\)"):
        build("vit_b16", (1, 28, 28), 10, {})


@pytest.mark.parametrize("name", ["mobilenet_v2", "vit_b16"])
def test_without_transformers_the_error_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        KeelError, match=rf"^model.name = '{name}' requires the extra 'vision': pip install 'keel-fl\[vision\]'$"
    ):
        build(name, (3, 32, 32), 10, {})
