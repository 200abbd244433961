"""MobileNetV2 and ViT-B/16 from the library `transformers` (extra `vision`), randomly initialised or pretrained.

Weights are read as safetensors or as plain tensors, never as a pickle that could execute code. Nothing is downloaded
except for a hub id that the user names.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keel.errors import KeelError
from keel.models.shapes import image
from keel.settings import PathText

PATCH = 16
DROPOUT, MOMENTUM = 0.2, 0.1
"""Dropout of MobileNetV2's head and momentum of its batch normalisation, as in torchvision."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_FILES = ["config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
FOLDER_OR_HUB = "a folder in transformers' format with safetensors weights, or a Hugging Face hub id (owner/name)"
TORCHVISION = "torchvision's checkpoint of MobileNetV2 (mobilenet_v2-b0353104.pth)"
HEAD = "classifier"
"""The name of the last layer of both networks."""


def mobilenet_v2(
    input_shape: tuple[int, ...], classes: int, *, pretrained: PathText | None = None, freeze: list[str] | None = None
) -> nn.Module:
    """MobileNetV2 for images (Sandler et al., 2018), randomly initialised or pretrained; with batch normalisation.

    Args:
        input_shape: (channels, height, width).
        classes: The number of classes. A pretrained head for another number is replaced by a random one.
        pretrained: A folder in transformers' format, a hub id, or torchvision's checkpoint file.
        freeze: The names of parts that are not trained, such as "mobilenet_v2".
    """
    channels, _, _ = image("mobilenet_v2", input_shape)
    library = _library("mobilenet_v2")
    family = library.MobileNetV2Config, library.MobileNetV2ForImageClassification
    if pretrained is None:
        network = _initialise(*family, classes, num_channels=channels)
    elif Path(pretrained).is_file():
        # torchvision pads symmetrically and has PyTorch's epsilon; transformers follows TensorFlow.
        network = _initialise(*family, classes, num_channels=channels, tf_padding=False, layer_norm_eps=1e-5)
        _read_torchvision(network, pretrained)
    else:
        network = _pretrained(family[1], pretrained, classes, f"{FOLDER_OR_HUB}, or {TORCHVISION}")
        _check_channels(network, channels, pretrained)
    # transformers copies TensorFlow's keep probability (0.8) and decay (0.997), which in PyTorch mean 1 minus these.
    network.dropout.p = DROPOUT
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = MOMENTUM
    return Logits(_freeze(network, freeze or []))


def vit_b16(
    input_shape: tuple[int, ...], classes: int, *, pretrained: PathText | None = None, freeze: list[str] | None = None
) -> nn.Module:
    """Vision transformer ViT-B/16 for images (Dosovitskiy et al., 2021), randomly initialised or pretrained.

    Args:
        input_shape: (channels, height, width). A pretrained network requires the size in its config.
        classes: The number of classes. A pretrained head for another number is replaced by a random one.
        pretrained: A folder in transformers' format, or a hub id.
        freeze: The names of parts that are not trained, such as "vit.embeddings".
    """
    channels, height, width = image("vit_b16", input_shape)
    library = _library("vit_b16")
    family = library.ViTConfig, library.ViTForImageClassification
    if pretrained is None:
        if height % PATCH or width % PATCH:
            raise KeelError(
                f"model.name = 'vit_b16' requires a height and width divisible by {PATCH} (got {height}x{width})"
            )
        network = _initialise(*family, classes, num_channels=channels, image_size=(height, width))
    else:
        network = _pretrained(family[1], pretrained, classes, FOLDER_OR_HUB)
        _check_channels(network, channels, pretrained)
        expected = tuple(network.vit.embeddings.image_size)
        if expected != (height, width):
            raise KeelError(
                f"model.pretrained = {pretrained!r} requires images of {expected[0]}x{expected[1]} pixels "
                f"(got {height}x{width})"
            )
    return Logits(_freeze(network, freeze or []))


class Logits(nn.Module):
    """A classifier of transformers that returns only its logits."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).logits


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation whose running statistics do not change in training."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        super().train(False)
        return self


def _library(model: str) -> Any:
    """Import transformers, which few runs need and which takes seconds to import."""
    try:
        return import_module("transformers")
    except ImportError:
        raise KeelError(f"model.name = {model!r} requires the extra 'vision': pip install 'keel-fl[vision]'") from None


def _initialise(config: Any, classifier: Any, classes: int, **architecture: Any) -> Any:
    with _quiet():
        return classifier(config(num_labels=classes, **architecture))


def _pretrained(classifier: Any, pretrained: str, classes: int, accepted: str) -> Any:
    try:
        with _quiet():
            network, report = classifier.from_pretrained(
                _folder(pretrained),
                num_labels=classes,
                ignore_mismatched_sizes=True,
                use_safetensors=True,
                local_files_only=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # both libraries, and those that they build on, raise exceptions of many types
        raise _unreadable(pretrained, str(error), accepted) from error
    uninitialised = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    other = sorted(name for name in uninitialised if not name.startswith(f"{HEAD}."))
    if other:
        raise _unreadable(pretrained, f"it lacks this model's {other[0]}", accepted)
    return network


def _folder(pretrained: str) -> Path:
    """Return the folder of the weights. Those of a hub id are downloaded: its config and safetensors, nothing else."""
    path = Path(pretrained)
    if path.is_dir():
        return path
    if path.exists() or path.suffix == ".pth" or not HUB_ID.fullmatch(pretrained):
        raise OSError("the folder does not exist")
    hub = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(pretrained, allow_patterns=HUB_FILES))
    except Exception as error:
        raise OSError(f"the folder does not exist, and the hub reports: {error}") from error


def _read_torchvision(network: nn.Module, file: str) -> None:
    """Load torchvision's weights: those of transformers under other names, in the same order."""
    try:
        theirs = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # the exception depends on the first bytes of the file
        raise _unreadable(file, "it is not a file of plain tensors", TORCHVISION) from error
    ours = network.state_dict()
    if not isinstance(theirs, dict) or len(theirs) != len(ours):
        raise _unreadable(file, "it has other weights", TORCHVISION)
    for (name, parameter), (their_name, weight) in zip(ours.items(), theirs.items(), strict=True):
        same = name.rpartition(".")[2] == their_name.rpartition(".")[2] and parameter.shape == weight.shape
        if same:
            parameter.copy_(weight)
        elif not name.startswith(f"{HEAD}."):
            raise _unreadable(file, f"{their_name} does not fit", TORCHVISION)


def _check_channels(network: Any, channels: int, pretrained: str) -> None:
    expected = network.config.num_channels
    if expected != channels:
        raise KeelError(f"model.pretrained = {pretrained!r} requires images of {expected} channels (got {channels})")


def _freeze(network: nn.Module, prefixes: list[str]) -> nn.Module:
    """Freeze the parameters below each name ("vit.embeddings") and return the network."""
    for prefix in prefixes:
        frozen = [p for name, p in network.named_parameters() if f"{name}.".startswith(f"{prefix}.")]
        if not frozen:
            names = ", ".join(name for name, part in network.named_children() if list(part.parameters()))
            raise KeelError(
                f"model.freeze: {prefix!r} is not a module with parameters; use one of {names} or a submodule of them"
            )
        for parameter in frozen:
            parameter.requires_grad_(False)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d) and not any(p.requires_grad for p in part.parameters()):
            part.__class__ = FrozenBatchNorm2d
    return network


def _unreadable(pretrained: str, reason: str, accepted: str) -> KeelError:
    line = (reason.strip().splitlines() or ["it cannot be read"])[0]
    return KeelError(f"model.pretrained: {pretrained!r} cannot be read ({line}); it must be {accepted}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings, logs and progress bars of the libraries; their errors are raised."""
    bars = import_module("transformers.utils.logging")
    shown = bars.is_progress_bar_enabled()
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("transformers", "huggingface_hub"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        bars.disable_progress_bar()
        try:
            yield
        finally:
            for logger, level in loggers.items():
                logger.setLevel(level)
            if shown:
                bars.enable_progress_bar()
