"""Adapts a user's module to one input tensor and one output tensor, which is what the engines handle.

A copy of the module gets a subclass of its class whose `forward` unpacks several inputs (`packing.py`) and picks one
tensor from what the model returns: the logits of a Hugging Face model, the first element of a tuple. The names of the
parameters and the type of the module stay what they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keel.core.copies import sharing_frozen
from keel.core.packing import Packing
from keel.errors import KeelError


@dataclass(frozen=True)
class Adapter:
    """How a module is called."""

    packing: Packing | None = None
    """The inputs of the model, if there are several."""
    own_loss: bool = False
    """Whether the output begins with a column that has the model's own loss (see `own_loss`)."""

    def raw(self, forward: Callable[..., Any], inputs: Tensor) -> Any:
        """Return what the model returns."""
        if self.packing is None:
            return forward(inputs)
        unpacked = self.packing.unpack(inputs)
        return forward(**unpacked) if isinstance(unpacked, dict) else forward(*unpacked)

    def call(self, forward: Callable[..., Any], inputs: Tensor) -> Tensor:
        """Return one tensor."""
        return self.tensor(self.raw(forward, inputs), inputs)

    def tensor(self, output: Any, inputs: Tensor) -> Tensor:
        """Return the tensor of an output that losses and metrics use."""
        predicted = prediction(output)
        if not self.own_loss:
            return predicted
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise KeelError("loss = 'model' requires a model that returns an object with 'loss', as Hugging Face's do")
        if loss.numel() not in (1, len(inputs)):
            raise KeelError(f"the model's own loss must be one number, or one per example (got {tuple(loss.shape)})")
        return torch.cat([loss.reshape(-1, 1).expand(len(inputs), 1), predicted.flatten(1)], 1)


def prediction(output: Any) -> Tensor:
    """Return the tensor of a model's output on which losses and metrics are computed.

    Raises:
        KeelError: There is none.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise KeelError(
        f"model must return a tensor, a tuple that begins with one, or an object with 'logits' (got "
        f"{type(output).__name__})"
    )


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss that the model itself computes, one equal number per example of the minibatch."""
    return outputs[:, 0]


class _Adapted:
    """The class that is put before the class of an adapted module."""

    adapter: Adapter

    def forward(self, inputs: Tensor) -> Tensor:
        return self.adapter.call(super().forward, inputs)  # type: ignore[misc]


def adapted(module: nn.Module, adapter: Adapter) -> nn.Module:
    """Return a copy of the module that takes one tensor and returns one."""
    copy = sharing_frozen(module)
    plain = type(module)
    copy.__class__ = type(plain.__name__, (_Adapted, plain), {"adapter": adapter, "plain_class": plain})
    return copy


def unadapted(module: nn.Module) -> nn.Module:
    """Give an adapted module its own class again, in place; return it."""
    if isinstance(module, _Adapted):
        module.__class__ = module.plain_class  # type: ignore[assignment]
    return module
