"""A torch module as one flat float32 vector: the weights are views of it, so that a step is one line of arithmetic."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter

from keel.core.adapted import unadapted
from keel.core.choices import Autocast
from keel.core.copies import sharing_frozen
from keel.core.fourier import use_direct, use_fourier
from keel.errors import KeelError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one loss per example; Keel takes the mean over a minibatch."""


class FlatModel:
    """A copy of `module` whose trainable parameters are views of the vector `weights`, with faster convolutions.

    Frozen parameters are those of `module`, not copies.

    Args:
        moving: The names of the buffers that training changes, such as BatchNorm's statistics. The float ones are read
            and set as one vector; the others (counters) are reset whenever that vector is set.
        precision: "bf16" computes in bfloat16 where PyTorch's autocast considers it safe.
    """

    def __init__(self, module: nn.Module, moving: Sequence[str] = (), precision: Autocast = "float32"):
        if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
            raise KeelError("model: has lazy layers without shapes; pass an input through it first")
        self.module, self._precision = sharing_frozen(module).train(), precision
        use_fourier(self.module)
        trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not trainable:
            raise KeelError(f"model: {type(module).__name__} has no trainable parameters")
        for name, parameter in trainable.items():
            if parameter.dtype != torch.float32:
                raise KeelError(f"model: parameter {name} must be torch.float32 (got {parameter.dtype}); use .float()")
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.sizes = [p.numel() for p in trainable.values()]
        self.parameters = list(trainable.values())
        self.weights = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self._gradient = torch.empty_like(self.weights)
        for parameter, view in zip(self.parameters, self.unflatten(self.weights).values(), strict=True):
            parameter.data = view
        self._moving = {name: self.module.get_buffer(name).clone() for name in moving}  # their initial values
        self.float_buffers = [name for name, buffer in self._moving.items() if buffer.is_floating_point()]

    def copy(self) -> "FlatModel":
        """A copy with the same weights, to try something on."""
        return FlatModel(self.module, tuple(self._moving), self._precision)

    def plain_module(self) -> nn.Module:
        """A copy that shares no tensor with the model, with PyTorch's own layers."""
        module = deepcopy(self.module)
        use_direct(module)
        return unadapted(module)

    @property
    def size(self) -> int:
        return self.weights.numel()

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Names to views of `vector`. One `split`, whose backward pass is one concatenation."""
        parts = torch.split(vector, self.sizes)
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of `loss` in a buffer that the next call overwrites."""
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in gradients], out=self._gradient)

    def outputs(self, inputs: Tensor) -> Tensor:
        """The model's outputs at `weights`."""
        return self._in_precision(lambda: self.module(inputs))

    def at(self, point: Tensor, inputs: Tensor) -> Tensor:
        """The model's outputs at another point than `weights`. Changes to the buffers are dropped."""
        buffers = {name: self.module.get_buffer(name).clone() for name in self._moving}
        return self._in_precision(lambda: functional_call(self.module, {**self.unflatten(point), **buffers}, (inputs,)))

    def _in_precision(self, forward: Callable[[], Tensor]) -> Tensor:
        if self._precision == "float32":
            return forward()
        with torch.autocast(self.weights.device.type, torch.bfloat16):
            return forward().float()

    def buffers(self) -> Tensor | None:
        """The float moving buffers as one vector; None for a model without any."""
        if not self.float_buffers:
            return None
        return torch.cat([self.module.get_buffer(name).reshape(-1) for name in self.float_buffers])

    def set_buffers(self, vector: Tensor | None) -> None:
        """Set the float moving buffers from one vector, and reset the others to their initial values."""
        values = dict(self._moving)
        if vector is not None and self.float_buffers:
            parts = torch.split(vector, [values[name].numel() for name in self.float_buffers])
            values |= {n: part.view_as(values[n]) for n, part in zip(self.float_buffers, parts, strict=True)}
        with torch.no_grad():
            for name, value in values.items():  # by name: a module may have replaced the tensor
                self.module.get_buffer(name).copy_(value)


def state_fingerprint(module: nn.Module) -> str:
    """SHA-256 of the module's parameters, trained or frozen, and buffers."""
    content = sha256()
    for name, tensor in module.state_dict().items():
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def fingerprint(vector: Tensor, buffers: Tensor | None = None) -> str:
    """SHA-256 of the bytes of the weights and buffers."""
    parts = [vector] if buffers is None else [vector, buffers]
    return sha256(b"".join(part.detach().cpu().contiguous().numpy().tobytes() for part in parts)).hexdigest()
