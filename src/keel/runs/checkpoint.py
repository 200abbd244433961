"""Checkpoints: a training state as a safetensors file next to the file of client states."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from keel.core.client_state import ClientStates
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.files import write_atomic

FORMAT = "2"
BUFFERS = "buffers/"
"""The name of the model's averaged buffers in a checkpoint."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a checkpoint can hold, and safetensors' names of them."""


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise a KeelError unless a checkpoint can hold the server state."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise KeelError(f"server state {name!r} must have a dtype that checkpoints can hold (got {tensor.dtype})")


def save_checkpoint(file: Path, state: TrainingState) -> None:
    """Write the training state; until it is complete the checkpoint before it stays."""
    clients = state.clients.save()
    signature = clients.pop("signature")
    tensors = {f"server/{name}": tensor for name, tensor in state.server.items()}
    tensors |= {f"clients/{name}": torch.from_numpy(array) for name, array in clients.items()}
    tensors |= {f"observed/{name}": tensor for name, tensor in state.observed.items()}
    tensors |= {f"norms/{name}": tensor for name, tensor in state.norms.items()}
    if state.buffers is not None:
        tensors[BUFFERS] = state.buffers
    metadata = {"format": FORMAT, "round": str(state.round), "signature": signature}
    write_atomic(file, safetensors_parts(tensors, metadata))
    state.clients.saved()


def load_checkpoint(file: Path, clients: ClientStates) -> TrainingState | None:
    """The saved training state with its client states in `clients`; None without a checkpoint."""
    if not file.is_file():
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
        elif kind == "buffers":
            state.buffers = tensors[key]
    state.clients.restore(tensors["clients/clients"].numpy(), tensors["clients/rows"].numpy(), metadata["signature"])
    return state


def load_observed(file: Path) -> dict[str, Tensor]:
    """The tensors that observers keep in a checkpoint; none without a checkpoint."""
    if not file.is_file():
        return {}
    tensors, _ = _read(file, "observed/")
    return {key.removeprefix("observed/"): tensor for key, tensor in tensors.items()}


def _read(file: Path, prefix: str | tuple[str, ...] = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint whose names begin with `prefix`, and its metadata."""
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata()
            if metadata.get("format") != FORMAT:
                raise KeelError(f"run: {str(file)!r} was written by another version of Keel; resume it with that one")
            names = [key for key in content.keys() if key.startswith(prefix)]  # noqa: SIM118 (not a dict)
            # copied: the rounding of some operations depends on how their operands are aligned in memory
            return {key: content.get_tensor(key).clone() for key in names}, metadata
    except SafetensorError as error:
        raise KeelError(
            f"run: {str(file)!r} is damaged ({error}); delete it, and summary.json if the run has ended, and run "
            "keel resume to restart from round 1"
        ) from error


def load_model(file: Path) -> tuple[int, Tensor, Tensor | None] | None:
    """The round, the model and its averaged buffers in a checkpoint; None without one. Other state is not read."""
    if not file.is_file():
        return None
    tensors, metadata = _read(file, ("server/theta", BUFFERS))
    return int(metadata["round"]), tensors["server/theta"], tensors.get(BUFFERS)


def safetensors_parts(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in parts, one tensor after the other: the library would copy all of them into RAM.

    The length of the header comes first, then the header as JSON, then the tensors: the widest dtypes first, so that
    each is aligned.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
