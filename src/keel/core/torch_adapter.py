"""The only module that uses interfaces of PyTorch that are private or experimental.

A new PyTorch may change them: tests/core/test_torch_adapter.py names the one that broke.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

BATCH_NORM = _BatchNorm
"""The class from which BatchNorm1d, 2d, 3d and SyncBatchNorm derive."""

BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda upstream, outputs: torch.ops.aten.threshold_backward(upstream, outputs, 0),
    nn.Tanh: torch.ops.aten.tanh_backward,
    nn.Sigmoid: torch.ops.aten.sigmoid_backward,
}
"""For activations: the gradient with respect to the inputs, from that with respect to the outputs and the outputs."""

Program = Callable[..., tuple[Tensor, Tensor]]
"""(weights, inputs, targets, shares), one row per client -> (gradients, losses)."""


def has_hooks(module: nn.Module, passes: tuple[str, ...] = ("forward", "backward")) -> bool:
    """Return whether a layer has a hook for one of these passes, so that it does more than its class says."""
    names = [f"_{direction}{kind}" for direction in passes for kind in ("_hooks", "_pre_hooks")]
    return any(getattr(layer, name) for layer in module.modules() for name in names)


def trace_gradients(loss: Callable[..., Tensor], example: list[Any]) -> torch.fx.GraphModule:
    """Trace each row's gradient and loss as one graph, for tensors of the example's shapes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *rows: vmap(grad_and_value(loss))(*rows))(*example)


def compile_gradients(loss: Callable[..., Tensor], example: list[Any]) -> Program:
    """Compile each row's gradient and loss to machine code, for contiguous tensors of the example's shapes.

    Compiled code is cached in the user's cache folder.

    Raises:
        RuntimeError: The compiler fails, or there is none.
    """
    from torch import _inductor  # importing it takes seconds

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    traced = trace_gradients(loss, example)
    for node in traced.graph.nodes:
        node.meta.clear()  # the compiler derives shapes itself and rejects those of the tracer
    program: Program = _inductor.compile(traced, example, options={"cpp_wrapper": True})
    return program
