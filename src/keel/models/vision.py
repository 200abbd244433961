"""MobileNetV2 and ViT-B/16 from the library `transformers` (extra `vision`), new or pretrained.

Weights are read as safetensors or as plain tensors, never as a pickle that could run code, and the network is
reached only for a hub id that the user names.
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
"""Of MobileNetV2's head and of its batch normalisation, as torchvision has them."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_FILES = ["config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
FOLDER_OR_HUB = "a folder in transformers' format with safetensors weights, or a Hugging Face hub id (owner/name)"
TORCHVISION = "torchvision's checkpoint of MobileNetV2 (mobilenet_v2-b0353104.pth)"
HEAD = "classifier"
"""What both networks call their last layer."""


def mobilenet_v2(
    input_shape: tuple[int, ...], classes: int, *, pretrained: PathText | None = None, freeze: list[str] | None = None
) -> nn.Module:
    """MobileNetV2 for images (Sandler et al. 2018), new or pretrained; it has batch normalisation.

    `pretrained` may also be a torchvision checkpoint file. A head with another number of classes is drawn anew.
    """
    channels, _, _ = image("mobilenet_v2", input_shape)
    library = _library("mobilenet_v2")
    family = library.MobileNetV2Config, library.MobileNetV2ForImageClassification
    if pretrained is None:
        network = _new(*family, classes, num_channels=channels)
    elif Path(pretrained).is_file():
        # torchvision's network pads both sides alike and keeps PyTorch's epsilon; transformers' follows TensorFlow.
        network = _new(*family, classes, num_channels=channels, tf_padding=False, layer_norm_eps=1e-5)
        _read_torchvision(network, pretrained)
    else:
        network = _pretrained(family[1], pretrained, classes, f"{FOLDER_OR_HUB}, or {TORCHVISION}")
        _expect_channels(network, channels, pretrained)
    # transformers takes over TensorFlow's keep probability (0.8) and decay (0.997), which here mean their opposites.
    network.dropout.p = DROPOUT
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = MOMENTUM
    return Logits(_frozen(network, freeze or []))


def vit_b16(
    input_shape: tuple[int, ...], classes: int, *, pretrained: PathText | None = None, freeze: list[str] | None = None
) -> nn.Module:
    """Vision transformer ViT-B/16 for images (Dosovitskiy et al. 2021), new or pretrained.

    A head with another number of classes is drawn anew; a pretrained network has its own config's size.
    """
    channels, height, width = image("vit_b16", input_shape)
    library = _library("vit_b16")
    family = library.ViTConfig, library.ViTForImageClassification
    if pretrained is None:
        if height % PATCH or width % PATCH:
            raise KeelError(f"model: vit_b16 needs images with sides that {PATCH} divides, not {height}x{width}")
        network = _new(*family, classes, num_channels=channels, image_size=(height, width))
    else:
        network = _pretrained(family[1], pretrained, classes, FOLDER_OR_HUB)
        _expect_channels(network, channels, pretrained)
        own = tuple(network.vit.embeddings.image_size)
        if own != (height, width):
            raise KeelError(
                f"model.pretrained: {pretrained!r} is for images of {own[0]}x{own[1]} pixels, not {height}x{width}"
            )
    return Logits(_frozen(network, freeze or []))


class Logits(nn.Module):
    """A classifier of transformers, giving its logits alone."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).logits


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation that keeps its statistics, in training too."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        super().train(False)
        return self


def _library(model: str) -> Any:
    """transformers, which few runs need and which takes seconds to import."""
    try:
        return import_module("transformers")
    except ImportError:
        raise KeelError(f"model: {model} needs the extra 'vision': pip install 'keel-fl[vision]'") from None


def _new(config: Any, classifier: Any, classes: int, **architecture: Any) -> Any:
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
    except Exception as error:  # both libraries raise kinds of their own, and of those that they build on
        raise _unreadable(pretrained, str(error), accepted) from error
    drawn = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    other = sorted(name for name in drawn if not name.startswith(f"{HEAD}."))
    if other:
        raise _unreadable(pretrained, f"it does not hold this model's {other[0]}", accepted)
    return network


def _folder(pretrained: str) -> Path:
    """Where the weights are; those of a hub id are fetched. Of a hub's files nothing but safetensors is asked for."""
    path = Path(pretrained)
    if path.is_dir():
        return path
    if path.exists() or path.suffix == ".pth" or not HUB_ID.fullmatch(pretrained):
        raise OSError("there is no such folder")
    hub = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(pretrained, allow_patterns=HUB_FILES))
    except Exception as error:
        raise OSError(f"there is no such folder, and the hub gives: {error}") from error


def _read_torchvision(network: nn.Module, file: str) -> None:
    """torchvision's weights, which are transformers' under other names: the order is the same."""
    try:
        theirs = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # a file that is none raises whatever its first bytes lead to
        raise _unreadable(file, "it is no file of plain tensors", TORCHVISION) from error
    ours = network.state_dict()
    if not isinstance(theirs, dict) or len(theirs) != len(ours):
        raise _unreadable(file, "it holds other weights", TORCHVISION)
    for (name, own), (their_name, weight) in zip(ours.items(), theirs.items(), strict=True):
        same = name.rpartition(".")[2] == their_name.rpartition(".")[2] and own.shape == weight.shape
        if same:
            own.copy_(weight)
        elif not name.startswith(f"{HEAD}."):
            raise _unreadable(file, f"{their_name} does not fit", TORCHVISION)


def _expect_channels(network: Any, channels: int, pretrained: str) -> None:
    own = network.config.num_channels
    if own != channels:
        raise KeelError(f"model.pretrained: {pretrained!r} is for images of {own} channels, not {channels}")


def _frozen(network: nn.Module, prefixes: list[str]) -> nn.Module:
    """The network, in which the parameters below each name ("vit.embeddings") are not trained."""
    for prefix in prefixes:
        below = [p for name, p in network.named_parameters() if f"{name}.".startswith(f"{prefix}.")]
        if not below:
            names = ", ".join(name for name, part in network.named_children() if list(part.parameters()))
            raise KeelError(f"model.freeze: {prefix!r} names no parameters; accepted: {names}, or a part of one")
        for parameter in below:
            parameter.requires_grad_(False)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d) and not any(p.requires_grad for p in part.parameters()):
            part.__class__ = FrozenBatchNorm2d
    return network


def _unreadable(pretrained: str, reason: str, accepted: str) -> KeelError:
    line = (reason.strip().splitlines() or ["it cannot be read"])[0]
    return KeelError(f"model.pretrained: {pretrained!r} cannot be used ({line}); accepted: {accepted}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the libraries' reports and progress bars off the user's terminal; what matters of them is raised."""
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
