"""Exports the trained model of a run: a safetensors file, a model card, and config.json for transformers."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from keel.errors import KeelError
from keel.runs.checkpoint import load_model, safetensors_parts
from keel.runs.files import write_atomic
from keel.runs.folder import RunFolder
from keel.runs.model_card import model_card
from keel.runs.trained import recorded_model, trained_tensors

SUFFIX = ".safetensors"
HUB_CONFIG = "config.json"
"""The name of the config that transformers reads."""


@dataclass(frozen=True)
class Exported:
    """The files that an export wrote."""

    model: Path
    card: Path
    config: Path | None
    """config.json, for a network of transformers."""
    sha256: str
    """Of the file `model`."""
    round: int


def export(folder: RunFolder, out: Path, *, force: bool = False, checkpoint: Path | None = None) -> Exported:
    """Write the model of a run's checkpoint, and its model card next to it.

    The tensors have the names of the module's state_dict; for a network of transformers, those of the network.

    Args:
        out: The file, whose name ends in .safetensors.
        force: Overwrite existing files.
        checkpoint: Another checkpoint of the run than the last one.

    Raises:
        KeelError: The run has no checkpoint, it diverged, or a file exists.
    """
    if out.suffix != SUFFIX:
        raise KeelError(f"--out must end in {SUFFIX} (got {str(out)!r})")
    saved = load_model(checkpoint or folder.checkpoint_file)
    if saved is None:
        raise folder.no_checkpoint()
    tensors = trained_tensors(folder, checkpoint)
    summary = folder.summary
    diverged = checkpoint is None and summary is not None and summary["status"] == "diverged"
    if diverged or not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise KeelError(
            f"run: {str(folder.path)!r} diverged, so that it has no model to export; use a smaller local.lr"
        )
    hub = recorded_model(folder).hub
    if hub is not None:
        tensors = {name.removeprefix(hub["prefix"]): tensor for name, tensor in tensors.items()}
    card, config = out.with_suffix(".md"), None if hub is None else out.parent / HUB_CONFIG
    files = [out, card, *([config] if config else [])]
    existing = [file for file in files if file.exists()]
    if existing and not force:
        raise KeelError(f"--out: {str(existing[0])!r} exists; use another name, or overwrite it with --force")
    out.parent.mkdir(parents=True, exist_ok=True)
    round, digest = saved[0], sha256()
    write_atomic(out, _hashed(safetensors_parts(tensors, _metadata(folder, round)), digest.update))
    if config is not None and hub is not None:
        write_atomic(config, [(json.dumps(hub["config"], indent=2) + "\n").encode()])
    write_atomic(card, [model_card(folder, out.name, round, tensors, digest.hexdigest()).encode()])
    return Exported(out, card, config, digest.hexdigest(), round)


def _metadata(folder: RunFolder, round: int) -> dict[str, str]:
    """The strings in the header of the file. transformers requires the format."""
    table, environment = folder.table, folder.environment
    return {
        "format": "pt",
        "keel": environment["keel"],
        "algorithm": folder.title,
        "data": table["data"]["name"],
        "model": table["model"]["name"],
        "rounds": str(round),
        "seed": str(table["seed"]),
    }


def _hashed(parts: Iterable[bytes | memoryview], update: Callable[[Any], None]) -> Iterator[bytes | memoryview]:
    """Yield the parts, and pass each to `update` of a hash."""
    for part in parts:
        update(part)
        yield part
