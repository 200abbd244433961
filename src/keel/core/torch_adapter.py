"""The only module that uses interfaces of PyTorch that are private or experimental.

A new PyTorch may change them: tests/core/test_torch_adapter.py names the one that broke.
"""

import os
from collections.abc import Callable
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.func import vmap
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

BATCH_NORM = _BatchNorm
"""The class from which BatchNorm1d, 2d, 3d and SyncBatchNorm derive."""

Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(weights, inputs, targets) of one client -> one loss per example."""
Compiled = Callable[..., tuple[Tensor, Tensor]]
"""(weights, inputs, targets, shares), one row per client -> (losses, gradients)."""


def has_hooks(module: nn.Module, passes: tuple[str, ...] = ("forward", "backward")) -> bool:
    """Return whether a layer has a hook for one of these passes, so that it does more than its class says."""
    names = [f"_{direction}{kind}" for direction in passes for kind in ("_hooks", "_pre_hooks")]
    return any(getattr(layer, name) for layer in module.modules() for name in names)


class Recorded(NamedTuple):
    """The description of a tensor in a recorded graph."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def record_gradients(losses: Losses, example: list[Tensor]) -> GraphModule:
    """Record the operations that compute each row's mean loss and gradient, for tensors of the example's shapes.

    A node whose value is a tensor describes it in `meta["tensor"]`.

    Args:
        losses: (weights, inputs, targets) of one client -> one loss per example.
        example: Weights, inputs, targets and each example's share in its client's mean, one row per client.

    Raises:
        RuntimeError: An operation has no batched version, or depends on the values of tensors or on random numbers.
    """
    weights, inputs, targets, shares = example
    functorch: Any = torch._C._functorch
    fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)  # it would loop over the rows
    try:
        with _NoReading(), _Recorder(example) as recorder, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            leaf = weights.detach().requires_grad_()
            values = vmap(losses)(leaf, inputs, targets)
            # torch.autograd.grad(values, leaf, shares), which also imports sympy
            (gradients,) = _engine_run_backward(
                (values,), (shares,), False, False, (leaf,), allow_unreachable=True, accumulate_grad=False
            )
            means = (values.detach() * shares).sum(1)
        return recorder.graph_module(means, gradients)
    finally:
        functorch._set_vmap_fallback_enabled(fallback)


def record_gradient(losses: Losses, example: list[Tensor]) -> GraphModule:
    """Record the operations that compute one client's mean loss and gradient.

    Args:
        losses: (weights, inputs, targets) -> one loss per example.
        example: Weights, inputs and targets.

    Raises:
        RuntimeError: An operation depends on the values of tensors or on random numbers.
    """
    weights, inputs, targets = example
    with _NoReading(), _Recorder(example) as recorder, torch.enable_grad():
        leaf = weights.detach().requires_grad_()
        loss = losses(leaf, inputs, targets).mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        loss = loss.detach()
    return recorder.graph_module(loss, gradient)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations on tensors beneath vmap and autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo, which takes a second


class WorkCounter(_Mode):  # type: ignore[no-untyped-call]
    """Counts the operations on tensors, the elements that they write, and their floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.elements, self.flops = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(output.alias_info for output in func._schema.returns):  # not a view
            self.operations += 1
            self.elements += sum(part.numel() for part in tree_leaves(result) if isinstance(part, Tensor))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READS_VALUES = {"tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
"""Methods of a tensor that return its values to Python."""


def _indexed_by_integers(func: Any, args: Any) -> bool:
    """Whether an operation indexes a tensor with integers, so that the result's shape does not depend on values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


class _NoReading(TorchFunctionMode):
    """Refuses to return the values of tensors to Python, where a recorded graph could not follow them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS_VALUES:
            raise RuntimeError(f"{func.__name__} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


class _Recorder(_Mode):  # type: ignore[no-untyped-call]
    """Records the operations on tensors as a graph."""

    def __init__(self, inputs: list[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = Graph(), nn.Module()
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # so that no two tensors have the same id
        for number, tensor in enumerate(inputs):
            self._add(tensor, self.graph.placeholder(f"input_{number}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _DEPENDS_ON_VALUES & set(func.tags) and not _indexed_by_integers(func, args):
            raise RuntimeError(f"{func} depends on the values of a tensor")
        may_draw = torch.Tag.nondeterministic_seeded in func.tags  # attention only with dropout
        before = torch.default_generator.get_state() if may_draw else None
        result = func(*args, **(kwargs or {}))
        if before is not None and not torch.equal(before, torch.default_generator.get_state()):
            raise RuntimeError(f"{func} draws random numbers")
        nodes = tree_map_only(Tensor, self._node, (args, kwargs or {}))
        node = self.graph.call_function(func, *nodes)
        if isinstance(result, Tensor):
            self._add(result, node)
        elif isinstance(result, tuple | list):
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._add(part, self.graph.call_function(getitem, (node, index)))
        return result

    def _add(self, tensor: Tensor, node: Node) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        node.meta["tensor"] = Recorded(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def _node(self, tensor: Tensor) -> Node:
        """Return a tensor's node; a tensor from outside is a constant of the graph."""
        if id(tensor) not in self.nodes:
            name = f"constant_{len(self.alive)}"
            self.root.register_buffer(name, tensor.detach())
            self._add(tensor, self.graph.get_attr(name))
        return self.nodes[id(tensor)]

    def graph_module(self, *outputs: Tensor) -> GraphModule:
        self.graph.output(tuple(self._node(tensor) for tensor in outputs))
        return GraphModule(self.root, self.graph)


def compile_gradients(recorded: GraphModule, example: list[Tensor]) -> Compiled:
    """Compile recorded operations to machine code, for contiguous tensors of the example's shapes.

    Compiled code is cached in the user's cache folder.

    Raises:
        RuntimeError: The compiler fails, or there is none.
    """
    from torch import _inductor  # importing it takes seconds

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    for node in recorded.graph.nodes:
        node.meta.clear()  # the compiler derives shapes itself
    program: Compiled = _inductor.compile(recorded, [*example], options={"cpp_wrapper": True})
    return program
