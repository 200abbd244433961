"""Policies for buffers that training changes, such as BatchNorm's running statistics.

average     they are sent with the model, and the server takes their weighted mean
local       each client keeps its own; elsewhere a batch is normalised by its own statistics
group_norm  GroupNorm replaces BatchNorm, so that no such buffers exist
"""

from copy import deepcopy
from typing import get_args

import torch
from torch import Tensor, nn

from keel.core.choices import BufferPolicy
from keel.core.torch_adapter import BATCH_NORM
from keel.errors import KeelError


def moving_buffers(module: nn.Module, before: dict[str, Tensor], policy: BufferPolicy | None) -> tuple[str, ...]:
    """The names of the buffers that a training pass changed, checked against the policy."""
    after = dict(module.named_buffers())
    moving = tuple(name for name, buffer in after.items() if not torch.equal(buffer, before[name]))
    if moving and policy == "group_norm":
        raise KeelError(f"model.buffers = 'group_norm' replaces only BatchNorm (got {moving[0]}); use 'average'")
    if moving and policy is None:
        raise KeelError(
            f"model.buffers must be one of {', '.join(map(repr, get_args(BufferPolicy)))}, since training changes the "
            f"buffer {moving[0]} (averaged over clients, kept local, or BatchNorm replaced by GroupNorm)"
        )
    if policy in ("average", "local") and not moving:
        raise KeelError(f"model.buffers = {policy!r}, but training changes no buffer of this model; leave it out")
    for name in moving:
        layer = module.get_submodule(name.rpartition(".")[0])
        if policy == "local" and not isinstance(layer, BATCH_NORM):
            raise KeelError(f"model.buffers = 'local' supports only BatchNorm (got {name}); use 'average'")
        if after[name].is_floating_point() and after[name].dtype != torch.float32:
            raise KeelError(f"model: buffer {name} must be torch.float32 (got {after[name].dtype})")
    return moving


def without_statistics(module: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers use each batch's own statistics."""
    module = deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, BATCH_NORM):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module
