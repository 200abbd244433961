"""What becomes of the buffers that training changes, such as BatchNorm's running statistics, which are no parameters.

average     they travel with the model, and the server takes their weighted mean
local       each client keeps its own; elsewhere a batch is normalised by its own statistics
group_norm  there are none: GroupNorm takes BatchNorm's place
"""

from copy import deepcopy
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from keel.errors import KeelError

BufferPolicy = Literal["average", "local", "group_norm"]


def moving_buffers(module: nn.Module, before: dict[str, Tensor], policy: BufferPolicy | None) -> tuple[str, ...]:
    """The names of the buffers that a training pass changed. They need a policy."""
    after = dict(module.named_buffers())
    moving = tuple(name for name, buffer in after.items() if not torch.equal(buffer, before[name]))
    if moving and policy == "group_norm":
        raise KeelError(f"model.buffers: 'group_norm', but {moving[0]} is not BatchNorm's; accepted: 'average'")
    if moving and policy is None:
        raise KeelError(
            f"model.buffers: training changes the buffer {moving[0]}, which is no parameter; accepted: "
            f"{', '.join(map(repr, get_args(BufferPolicy)))} (averaged, kept local, BatchNorm replaced by GroupNorm)"
        )
    if policy in ("average", "local") and not moving:
        raise KeelError(f"model.buffers: {policy!r}, but training changes no buffer of this model; leave it out")
    for name in moving:
        layer = module.get_submodule(name.rpartition(".")[0])
        if policy == "local" and not isinstance(layer, _BatchNorm):
            raise KeelError(f"model.buffers: 'local', but {name} is not BatchNorm's; accepted: 'average'")
        if after[name].is_floating_point() and after[name].dtype != torch.float32:
            raise KeelError(f"model: buffer {name} is {after[name].dtype}; accepted: torch.float32")
    return moving


def without_statistics(module: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers use each batch's own statistics: nobody's are right for everybody."""
    module = deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module
