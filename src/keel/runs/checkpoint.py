"""Checkpoints: a training state as a safetensors file with checksums, next to the file of client states."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from keel.core.client_state import ClientStates, SavedRows
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.checked_tensors import DTYPES, checked_parts, has_checksums, read_checked
from keel.runs.files import write_atomic
from keel.runs.sealed import TOO_MANY_OPEN, damaged

FORMAT, WITHOUT_CHECKSUMS = "3", "2"
BUFFERS = "buffers/"
"""The name of the model's averaged buffers in a checkpoint."""


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise a KeelError unless a checkpoint can hold the server state."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise KeelError(f"server state {name!r} must have a dtype that checkpoints can hold (got {tensor.dtype})")


def previous_of(file: Path) -> Path:
    """The file of the checkpoint before the one in `file`."""
    return file.with_name(f"previous-{file.name}")


def save_checkpoint(file: Path, state: TrainingState, record: str = "") -> None:
    """Write the training state; the checkpoint before it is kept as well, and no other.

    Args:
        record: The checksum of its round's record, by which a checkpoint of another run is detected.
    """
    saved = state.clients.save()
    tensors = {f"server/{name}": tensor for name, tensor in state.server.items()}
    tensors |= {f"clients/{name}": torch.from_numpy(array) for name, array in saved.arrays.items()}
    tensors |= {f"observed/{name}": tensor for name, tensor in state.observed.items()}
    tensors |= {f"norms/{name}": tensor for name, tensor in state.norms.items()}
    tensors |= {f"mean/{name}": tensor for name, tensor in state.mean.items()}
    if state.buffers is not None:
        tensors[BUFFERS] = state.buffers
    metadata = {"format": FORMAT, "round": str(state.round), "signature": saved.signature, "record": record}
    write_atomic(file, checked_parts(tensors, metadata), keep=previous_of(file))
    state.clients.saved()


def load_checkpoint(file: Path, clients: ClientStates) -> TrainingState | None:
    """The saved training state with its client states in `clients`; None without a checkpoint.

    Raises:
        DamagedFile: The file is not what was written.
    """
    if not os.path.lexists(file):
        return None
    state = TrainingState(0, {}, clients)
    tensors, metadata = _read(file)
    state.round = int(metadata["round"])
    for key in sorted(tensors):
        kind, _, name = key.partition("/")  # names of server state may contain a slash
        if kind == "server":
            state.server[name] = tensors[key]
        elif kind == "observed":
            state.observed[name] = tensors[key]
        elif kind == "norms":
            state.norms[name] = tensors[key]
        elif kind == "mean":
            state.mean[name] = tensors[key]
        elif kind == "buffers":
            state.buffers = tensors[key]
    state.clients.restore(_saved_rows(tensors, metadata))
    return state


def protect_rows(file: Path, clients: ClientStates) -> None:
    """Keep the rows of client states that the checkpoint in `file` needs, if it exists and is intact."""
    if file.is_file():
        tensors, metadata = _read(file, "clients/")
        clients.protect(_saved_rows(tensors, metadata))


def _saved_rows(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedRows:
    arrays = {k.removeprefix("clients/"): t.numpy() for k, t in tensors.items() if k.startswith("clients/")}
    return SavedRows(arrays, metadata["signature"])


def record_of(file: Path) -> tuple[int, str]:
    """The round of a checkpoint and the checksum of its record, which is empty if earlier versions wrote it."""
    _, metadata = _read(file, ())
    return int(metadata["round"]), metadata.get("record", "")


def load_observed(file: Path) -> dict[str, Tensor]:
    """The tensors that observers keep in a checkpoint; none without a checkpoint."""
    if not file.is_file():
        return {}
    tensors, _ = _read(file, "observed/")
    return {key.removeprefix("observed/"): tensor for key, tensor in tensors.items()}


def load_model(file: Path) -> tuple[int, Tensor, Tensor | None] | None:
    """The round, the model and its averaged buffers in a checkpoint; None without one. Other state is not read."""
    if not file.is_file():
        return None
    tensors, metadata = _read(file, ("server/theta", BUFFERS))
    return int(metadata["round"]), tensors["server/theta"], tensors.get(BUFFERS)


def _read(file: Path, prefix: str | tuple[str, ...] = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint whose names begin with `prefix`, and its metadata."""
    try:
        tensors, metadata = read_checked(file, prefix, required=False)
    except (ValueError, OSError) as error:
        if getattr(error, "errno", None) in TOO_MANY_OPEN:
            raise
        raise damaged(file, str(error), file.parent.parent) from None
    if metadata.get("format") not in (FORMAT, WITHOUT_CHECKSUMS):
        raise KeelError(f"run: {str(file)!r} was written by another version of Keel; resume it with that one")
    if metadata["format"] == FORMAT and not has_checksums(file):
        raise damaged(file, "its checksums are missing", file.parent.parent)
    if missing := {"round", "signature"} - metadata.keys():
        raise damaged(file, f"{min(missing)} is missing", file.parent.parent)
    return tensors, metadata
