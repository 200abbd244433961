"""Replace batch normalisation by group normalisation, which has no running statistics to share between clients."""

from copy import deepcopy

from torch import nn

GROUPS = 2
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def group_norm(module: nn.Module) -> nn.Module:
    """Return a copy with nn.GroupNorm in place of each batch normalisation: two groups, one if the channels are odd."""
    copy = deepcopy(module)
    if isinstance(copy, BATCH_NORMS):
        return _grouped(copy)
    replaced: dict[nn.Module, nn.GroupNorm] = {}  # a layer that is used twice stays one layer
    for name, part in list(copy.named_modules(remove_duplicate=False)):
        if isinstance(part, BATCH_NORMS):
            if part not in replaced:
                replaced[part] = _grouped(part)
            copy.set_submodule(name, replaced[part])
    return copy


def _grouped(batch: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> nn.GroupNorm:
    channels = batch.num_features
    grouped = nn.GroupNorm(1 if channels % GROUPS else GROUPS, channels, eps=batch.eps, affine=batch.affine)
    if batch.affine:
        grouped.weight, grouped.bias = batch.weight, batch.bias
    return grouped.train(batch.training)
