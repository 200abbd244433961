"""Weights by name: read from a file of plain tensors, checked against a module, and copied into it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from keel.errors import KeelError
from keel.models.hub import hub_network

SHOWN = 3
"""The number of names that an error lists."""


def load_initial(module: nn.Module, file: str) -> None:
    """Copy the weights in the file `model.init` into a module. Buffers that the file lacks stay as they are.

    Raises:
        KeelError: The file cannot be read, does not fit the module, or has values that are not finite.
    """
    tensors, field = read_tensors(file), f"model.init: {file!r}"
    network = hub_network(module)
    if network is not None and not any(name.startswith(network.prefix) for name in tensors):
        module = network.module  # transformers' names of the same tensors
    if reason := misfit(module, tensors):
        raise KeelError(f"{field} does not fit the model: {reason}")
    for name, value in tensors.items():  # after their shapes are checked: a small file may declare any shape
        if value.is_floating_point() and not torch.isfinite(value.to(_tensors_of(module)[name].dtype)).all():
            raise KeelError(f"{field} has values that are not finite in {name}; use other weights")
    copy_tensors(module, tensors)


def read_tensors(file: str) -> dict[str, Tensor]:
    """Read a safetensors file or a state_dict that torch.save wrote. Code in it is never executed."""
    if not Path(file).is_file():
        raise KeelError(f"model.init: {file!r} is not a file; use a .safetensors file or a saved state_dict")
    try:
        if Path(file).suffix == ".safetensors":
            return load_file(file)
        if is_zipfile(file):
            with ZipFile(file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > Path(file).stat().st_size:
                    raise ValueError("it is compressed, as torch.save never does")
        tensors = torch.load(file, weights_only=True, map_location="cpu")
    except (SafetensorError, OSError) as error:
        raise KeelError(f"model.init: {file!r} cannot be read ({str(error).splitlines()[0]})") from error
    except Exception as error:  # torch.load's exception depends on the first bytes of the file
        raise KeelError(
            f"model.init: {file!r} is not a file of plain tensors; save it with torch.save(model.state_dict(), ...)"
        ) from error
    if not isinstance(tensors, Mapping):
        raise KeelError(f"model.init: {file!r} must hold a state_dict (got {type(tensors).__name__})")
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            raise KeelError(
                f"model.init: {file!r} must hold tensors by name (got {name!r} of type {type(value).__name__}); save "
                "model.state_dict() alone"
            )
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            raise KeelError(
                f"model.init: {file!r} must hold dense tensors (got {name!r}, which is sparse, quantised or without "
                "values)"
            )
    return dict(tensors)


def misfit(module: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Return why tensors do not fit a module; None if they do.

    Every parameter needs a value, by one of its names if it is tied. Buffers need none.
    """
    known = _tensors_of(module)
    if any(is_lazy(parameter) for parameter in module.parameters()):
        return "the model has lazy layers without shapes; pass an input through it first"
    found = {id(known[name]) for name in tensors if name in known}
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in found]
    unexpected = [name for name in tensors if name not in known]
    parts = [f"it lacks {_list(missing)}"] * bool(missing) + [f"it has unexpected {_list(unexpected)}"] * bool(
        unexpected
    )
    if parts:
        return " and ".join(parts)
    for name, value in tensors.items():
        own = known[name]
        if own.shape != value.shape:
            return f"{name} has the shape {tuple(value.shape)}, the model's has {tuple(own.shape)}"
        if own.is_floating_point() != value.is_floating_point():
            return f"{name} is {value.dtype}, the model's is {own.dtype}"
    return None


@torch.no_grad()
def copy_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set the module's parameters and buffers of these names."""
    known = _tensors_of(module)
    for name, value in tensors.items():
        known[name].copy_(value)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name; a tied parameter has several names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _list(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
