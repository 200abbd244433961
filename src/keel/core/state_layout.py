"""Where the tensors of a module's state_dict are in the vectors that a run trains, so that they can be read by name."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from typing import Any, Literal

from torch import Tensor, nn

from keel.core.flat_model import FlatModel
from keel.errors import KeelError

Source = Literal["weights", "buffers", "frozen"]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a state_dict."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: Source
    """The vector of trained weights, the vector of averaged buffers, or a file: training does not change it."""
    offset: int = 0
    """The position of the tensor's first element in its vector."""


@dataclass(frozen=True)
class StateLayout:
    """The tensors of a state_dict in its order. A tied parameter has one entry per name."""

    tensors: tuple[StoredTensor, ...]

    def state_dict(self, weights: Tensor, buffers: Tensor | None, frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors out of the vectors."""
        return {tensor.name: _value(tensor, weights, buffers, frozen) for tensor in self.tensors}

    def frozen(self, module: nn.Module) -> dict[str, Tensor]:
        """The tensors that training does not change, and so are in no checkpoint."""
        state = module.state_dict()
        return {tensor.name: state[tensor.name].cpu() for tensor in self.tensors if tensor.source == "frozen"}

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(tensor) for tensor in self.tensors]

    @classmethod
    def from_json(cls, content: Sequence[Mapping[str, Any]]) -> "StateLayout":
        return cls(tuple(StoredTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in content))


def state_layout(model: FlatModel) -> StateLayout:
    """The layout of a flat model."""
    module = model.module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    places: dict[int, tuple[Source, int]] = {}
    for name, offset in zip(model.names, accumulate(model.sizes, initial=0), strict=False):
        places[id(parameters[name])] = "weights", offset
    moving = [module.get_buffer(name) for name in model.float_buffers]
    for buffer, offset in zip(moving, accumulate((b.numel() for b in moving), initial=0), strict=False):
        places[id(buffer)] = "buffers", offset
    tensors = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        source, offset = places.get(id(tensor), ("frozen", 0))
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(StoredTensor(name, tuple(tensor.shape), dtype, source, offset))
    return StateLayout(tuple(tensors))


def _value(tensor: StoredTensor, weights: Tensor, buffers: Tensor | None, frozen: Mapping[str, Tensor]) -> Tensor:
    if tensor.source == "frozen":
        if tensor.name not in frozen:
            raise KeelError(f"model: the run did not record {tensor.name}, whose dtype is {tensor.dtype}")
        return frozen[tensor.name].clone()
    vector = weights if tensor.source == "weights" else buffers
    size = prod(tensor.shape)
    if vector is None or tensor.offset + size > len(vector):
        raise KeelError(f"model: the checkpoint has no {tensor.name}; it belongs to another run")
    return vector[tensor.offset : tensor.offset + size].view(tensor.shape).clone()
