"""Losses and gradients, of one client or of stacked clients, as a graph of tensor operations, recorded once per shape.

A recorded graph runs without vmap and autograd, whose bookkeeping costs more than the arithmetic of a small model.
Before it runs, operations that change nothing are removed, equal operations are merged, and what does not depend on the
minibatch (the layers' weights as views of the weight matrix, constants) is computed once instead of in every step.
"""

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from keel.core.torch_adapter import Losses, Recorded, record_gradient, record_gradients

aten = torch.ops.aten

VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.split_with_sizes.default,
    aten.detach.default,
    aten.alias.default,
}
"""Operations whose outputs share memory with their first input."""
FILLED = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
"""Operations that return a tensor filled with one number."""
CONSTANTS = {aten.full.default, aten.scalar_tensor.default, aten.arange.default, aten.arange.start_step}
"""Operations without tensors among their inputs."""
FASTER = {
    aten.view.default: Tensor.view,
    aten.expand.default: Tensor.expand,
    **{
        getattr(getattr(aten, name), overload): getattr(torch, name)
        for name, overload in (
            ("transpose", "int"),
            ("permute", "default"),
            ("unsqueeze", "default"),
            ("bmm", "default"),
            ("add", "Tensor"),
            ("sub", "Tensor"),
            ("mul", "Tensor"),
            ("mul", "Scalar"),
            ("div", "Tensor"),
            ("neg", "default"),
            ("relu", "default"),
            ("tanh", "default"),
            ("sigmoid", "default"),
            ("gather", "default"),
            ("cat", "default"),
            ("clone", "default"),
        )
    },
}
"""The same operations with less overhead per call."""


class Program:
    """Losses and gradients of one client or of stacked clients, for tensors of the shapes and strides of an example.

    Args:
        recorded: A graph of (weights, inputs, targets, ...) that returns losses and gradients.
    """

    def __init__(self, recorded: GraphModule):
        self._prepare, self._run = _split(recorded)

    @classmethod
    def of_clients(cls, losses: Losses, example: list[Tensor]) -> "Program":
        """Record the mean losses and gradients of stacked clients.

        Args:
            losses: (weights, inputs, targets) of one client -> one loss per example.
            example: Weights, inputs, targets and each example's share in its client's mean, one row per client.

        Raises:
            RuntimeError: The computation cannot be recorded.
        """
        return cls(simplified(record_gradients(losses, example)))

    @classmethod
    def of_one_client(cls, losses: Losses, example: list[Tensor]) -> "Program":
        """Record the mean loss and gradient of one client, with the bits of autograd.

        Args:
            losses: (weights, inputs, targets) -> one loss per example.
            example: Weights, inputs and targets.
        """
        return cls(simplified(record_gradient(losses, example), exactly=True))

    @property
    def step_code(self) -> str:
        """The Python code of one step."""
        return str(self._run.__self__.code)  # type: ignore[attr-defined]

    def bind(self, weights: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return a function of (inputs, targets, shares) that gives losses and gradients at the weights' values."""
        with torch.no_grad():
            return partial(self._run, *self._prepare(weights), weights)


def simplified(recorded: GraphModule, exactly: bool = False) -> GraphModule:
    """Remove operations that change nothing and merge equal ones; unless `exactly`, also where rounding changes."""
    graph = recorded.graph
    if any(map(_mutates, graph.nodes)):  # the order of its operations matters
        return recorded
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        _fill(node)
        same = (
            _unchanged(node)
            or (None if exactly else _transposed_product(node))
            or first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        )
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    if not exactly:
        for node in list(graph.nodes):
            _fuse_bias(node)
        graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


def _mutates(node: Node) -> bool:
    return node.op == "call_function" and hasattr(node.target, "_schema") and node.target._schema.is_mutable


def _fill(node: Node) -> None:
    """Make a node that returns a tensor of one number independent of the other nodes."""
    if node.target in FILLED:
        tensor: Recorded = node.meta["tensor"]
        node.args = (list(tensor.shape), FILLED[node.target])
        node.kwargs = {"dtype": tensor.dtype, "device": tensor.device}
        node.target = aten.full.default


def _unchanged(node: Node) -> Node | None:
    """Return the node whose value this one only repeats; None if there is none."""
    if not node.args or not isinstance(source := node.args[0], Node):
        return None
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        return source if node.meta["tensor"] == source.meta.get("tensor") else None
    if node.target is aten.transpose.int:
        again = source.target is aten.transpose.int and source.args[1:] == node.args[1:]
        return source.args[0] if again else None  # type: ignore[return-value]  # transpose's first argument is a node
    if node.target is aten.permute.default:
        return source if list(node.args[1]) == list(range(len(node.args[1]))) else None  # type: ignore[arg-type]
    if node.target not in (*VIEWS, aten.clone.default):
        return None
    return source if node.meta.get("tensor") == source.meta.get("tensor") is not None else None


def _transposed_product(node: Node) -> Node | None:
    """Return b' @ a' for a node that transposes a @ b, which saves copying the result; None for other nodes."""
    product = node.args[0] if node.target is aten.transpose.int and node.args[1:] in ((1, 2), (2, 1)) else None
    if not isinstance(product, Node) or product.target is not aten.bmm.default or len(product.users) > 1:
        return None
    with node.graph.inserting_before(node):
        factors = tuple(map(_transposed, reversed(product.args)))
        result = node.graph.call_function(aten.bmm.default, factors)
    _, height, width = node.meta["tensor"].shape
    result.meta["tensor"] = node.meta["tensor"]._replace(stride=(height * width, width, 1))
    return result


def _transposed(matrix: Any) -> Node:
    if matrix.target is aten.transpose.int and matrix.args[1:] in ((1, 2), (2, 1)):
        return matrix.args[0]
    node = matrix.graph.call_function(aten.transpose.int, (matrix, 1, 2))
    rows, height, width = (matrix.meta["tensor"].shape[axis] for axis in (0, 2, 1))
    strides = tuple(matrix.meta["tensor"].stride[axis] for axis in (0, 2, 1))
    node.meta["tensor"] = matrix.meta["tensor"]._replace(shape=torch.Size((rows, height, width)), stride=strides)
    return node


def _fuse_bias(node: Node) -> None:
    """Replace bias + a @ b by one operation."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return
    for product, bias in (node.args, node.args[::-1]):
        if not isinstance(product, Node) or not isinstance(bias, Node):
            continue
        if product.target is not aten.bmm.default or len(product.users) > 1:
            continue
        result, added = product.meta["tensor"], bias.meta["tensor"]
        if node.meta["tensor"].shape == result.shape and result.dtype == added.dtype and len(added.shape) == 3:
            node.target, node.args = aten.baddbmm.default, (bias, *product.args)
            return


def _split(
    recorded: GraphModule,
) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, Tensor]]]:
    """Split a graph into what does not depend on the values of its inputs, and the rest.

    The first part has views of the weight matrix and constants, or nothing if an operation changes a tensor in place.
    The inputs of the second part are the outputs of the first and all inputs of the graph.
    """
    nodes = list(recorded.graph.nodes)
    prepare = not any(map(_mutates, nodes))
    inputs = [node for node in nodes if node.op == "placeholder"]
    prepared: set[Node] = set()
    for node in nodes:
        fixed = all(source is inputs[0] or source in prepared for source in node.all_input_nodes)
        if prepare and fixed and node.target in (*VIEWS, *CONSTANTS, getitem):
            prepared.add(node)
    used = [node for node in nodes if node in prepared and any(user not in prepared for user in node.users)]
    first, second = Graph(), Graph()
    copies = {inputs[0]: first.placeholder("weights")}
    for node in nodes:
        if node in prepared:
            copies[node] = _copy(first, node, copies)
    first.output(tuple(copies[node] for node in used))
    copies = {node: second.placeholder(node.name) for node in [*used, *inputs]}
    for node in nodes:
        if node not in prepared and node.op != "placeholder":
            copies[node] = _copy(second, node, copies)
    second.eliminate_dead_code()
    return GraphModule(recorded, first).forward, GraphModule(recorded, second).forward


def _copy(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    copy = graph.node_copy(node, copies.__getitem__)
    copy.target = FASTER.get(copy.target, copy.target)
    return copy
