"""Convolution of small images with the Fourier transform, as matrix products.

A k x k convolution with m x m outputs takes k^2 m^2 multiplications per pair of channels. The product of two spectra of
n x n, n = m + k - 1, takes about 2 n^2: 448 instead of 2,500 for a 5x5 kernel on 14x14 pixels. At this size the fastest
transform is a product with the matrix of the transform, one axis after the other. The whole layer is then matrix
products, which autograd, vmap and compilers support.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, tau
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Matrix = NDArray[np.float64]

SPEED_RATIO = 2
"""How many times faster a multiplication is in a direct convolution than in the products of spectra."""
MIN_CHANNELS = 32
"""With fewer channels the products of spectra are too small to be fast."""
MARGIN = 2
"""How many times more examples than by the count of multiplications a minibatch needs."""


def use_fourier(module: nn.Module) -> None:
    """Let every convolution of a model choose the Fourier transform where it is faster; parameters stay the same."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _supported(layer):
            layer.__class__ = FourierConv2d


def use_direct(module: nn.Module) -> None:
    """Undo `use_fourier`."""
    for layer in module.modules():
        if type(layer) is FourierConv2d:
            cast(Any, layer).__class__ = nn.Conv2d


def _supported(layer: nn.Conv2d) -> bool:
    if {"forward", "_conv_forward"} & vars(layer).keys():  # the user has replaced the computation of this layer
        return False
    square = len({*layer.kernel_size}) == 1 and not isinstance(layer.padding, str) and len({*layer.padding}) == 1
    plain = (*layer.stride, *layer.dilation, layer.groups) == (1, 1, 1, 1, 1) and layer.padding_mode == "zeros"
    return square and plain


def min_batch(inputs: int, outputs: int, side: int, image: tuple[int, int], padding: int = 0) -> int | None:
    """Return the smallest minibatch for which the Fourier transform is faster, by multiplications; None if never.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        side: Height and width of the kernel.
        image: Height and width of the images.
        padding: Zeros on every side of an image.
    """
    (height, width), (rows, columns) = image, _period(image, padding)
    if min(image) + 2 * padding < side or min(inputs, outputs) < MIN_CHANNELS:
        return None
    pairs, frequencies = inputs * outputs, rows // 2 + 1
    direct = pairs * side**2 * (height + 2 * padding - side + 1) * (width + 2 * padding - side + 1)
    spectra = pairs * 4 * frequencies * columns
    transforms = (inputs + outputs) * 2 * frequencies * width * (height + 2 * columns)
    saved = direct - SPEED_RATIO * (spectra + transforms)
    kernel_transform = pairs * 2 * frequencies * side * (side + 2 * columns)  # once per minibatch
    return None if saved <= 0 else ceil(MARGIN * SPEED_RATIO * kernel_transform / saved)


class FourierConv2d(nn.Conv2d):
    """nn.Conv2d to rounding, faster on a CPU for small images and minibatches that are large enough.

    For other images, for smaller minibatches and on other devices it computes exactly what nn.Conv2d does.
    """

    def forward(self, input: Tensor) -> Tensor:
        plan = self._plan(input)
        if plan is None or len(input) < plan.min_batch:
            return super().forward(input)
        images, images_i = plan.spectra(plan.image_transform, input.permute(2, 3, 0, 1))
        kernels, kernels_i = plan.spectra(plan.kernel_transform, self.weight.permute(2, 3, 1, 0))
        real = torch.baddbmm(torch.bmm(images, kernels), images_i, kernels_i, alpha=-1)
        imaginary = torch.baddbmm(torch.bmm(images, kernels_i), images_i, kernels)
        across, down = plan.inverse_transform
        spectra = torch.stack((real, imaginary), 1).view(plan.frequencies, across.shape[1], -1)
        output = (down @ (across @ spectra).view(2 * plan.frequencies, -1)).view(len(down), -1, *real.shape[1:])
        if self.bias is not None:
            output = output + self.bias
        if input.stride(1) == 1:  # channels last, by operations that vmap supports
            return output.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)
        return output.permute(2, 3, 0, 1).contiguous()

    def _plan(self, input: Tensor) -> "Plan | None":
        if input.dim() != 4 or input.device.type != "cpu" or input.dtype != torch.float32:
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        height, width = input.shape[-2:]
        return _plan(self.in_channels, self.out_channels, self.kernel_size[0], (height, width), int(self.padding[0]))


@dataclass(frozen=True)
class Plan:
    """The matrices of the transforms for one size of images and kernels.

    The spectrum of a real signal is symmetric: (rows // 2 + 1) x columns frequencies of a period are enough, each with
    a real and an imaginary part.
    """

    min_batch: int
    frequencies: int
    image_transform: tuple[Tensor, Tensor]
    kernel_transform: tuple[Tensor, Tensor]
    inverse_transform: tuple[Tensor, Tensor]

    def spectra(self, matrices: tuple[Tensor, Tensor], signals: Tensor) -> tuple[Tensor, ...]:
        """Transform signals (row, column, ...) to the real and the imaginary part, one matrix per frequency."""
        down, across = matrices
        rows, columns, *rest = signals.shape
        halfway = (down @ signals.reshape(rows, -1)).view(self.frequencies, 2 * columns, -1)
        return (across @ halfway).view(-1, 2, *rest).unbind(1)


@lru_cache(maxsize=64)
def _plan(inputs: int, outputs: int, side: int, image: tuple[int, int], padding: int) -> Plan | None:
    """Return the plan for a convolution; None if the direct one is always faster."""
    smallest = min_batch(inputs, outputs, side, image, padding)
    if smallest is None:
        return None
    period, kernel = _period(image, padding), range(-padding, side - padding)
    return Plan(
        smallest,
        period[0] // 2 + 1,
        _forward([range(length) for length in image], period, sign=-1),
        _forward([kernel, kernel], period, sign=1),  # conjugate: the layer is a correlation
        _inverse([range(length + 2 * padding - side + 1) for length in image], period),
    )


def _period(image: tuple[int, int], padding: int) -> tuple[int, int]:
    """Return the period of the transform: long enough that a kernel beyond one edge meets zeros, not the other edge."""
    return image[0] + padding, image[1] + padding


def _forward(positions: Sequence[range], period: tuple[int, int], sign: int) -> tuple[Tensor, Tensor]:
    """Return the matrices from (row, column) to (frequency, part, column) and on to (frequency, frequency, part)."""
    cosines, sines = _waves(period[0] // 2 + 1, positions[0], period[0])
    down = np.stack((cosines, sign * sines), 1)
    cosines, sines = _waves(period[1], positions[1], period[1])
    across = np.stack((np.hstack((cosines, -sign * sines)), np.hstack((sign * sines, cosines))), 1)
    return _tensor(down.reshape(-1, len(positions[0]))), _tensor(across.reshape(-1, 2 * len(positions[1])))


def _inverse(positions: Sequence[range], period: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the matrices from (frequency, frequency, part) to (frequency, part, column) and on to (row, column)."""
    cosines, sines = (wave.T for wave in _waves(period[1], positions[1], period[1]))
    across = np.vstack((np.stack((cosines, -sines), 2), np.stack((sines, cosines), 2)))
    cosines, sines = (wave.T for wave in _waves(period[0] // 2 + 1, positions[0], period[0]))
    frequencies = np.arange(period[0] // 2 + 1)
    # A frequency counts twice if its mirror image was left out.
    weights = np.where(2 * frequencies % period[0] == 0, 1, 2) / (period[0] * period[1])
    down = np.stack((cosines * weights, -sines * weights), 2)
    return _tensor(across.reshape(2 * len(positions[1]), -1)), _tensor(down.reshape(len(positions[0]), -1))


def _waves(frequencies: int, positions: range, period: int) -> tuple[Matrix, Matrix]:
    angles = tau / period * (np.outer(np.arange(frequencies), np.array(positions)) % period)
    return np.cos(angles), np.sin(angles)


def _tensor(matrix: Matrix) -> Tensor:
    return torch.from_numpy(matrix.astype(np.float32))
