"""PyTorch's fast path of transformer layers, which ignores adapters.

In evaluation mode `nn.TransformerEncoderLayer` reads the weights of its parts instead of calling them, so that what an
adapter adds to a part is left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

PARTS = {"self_attn": nn.MultiheadAttention, "linear1": nn.Linear, "linear2": nn.Linear}
"""The parts of a layer whose weights the fast path reads, and the classes that it assumes."""


def ignores_adapters(module: nn.Module) -> bool:
    """Whether the fast path would leave out what parts of other classes compute."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    return any(type(getattr(layer, name)) is not kind for layer in layers for name, kind in PARTS.items())


@contextmanager
def calling_all_parts(module: nn.Module) -> Iterator[None]:
    """Turn the fast path off if the module has adapters that it ignores."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and not ignores_adapters(module))
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
