"""Convolution of small images with the Fourier transform, as matrix products.

A k x k convolution with m x m outputs takes k^2 m^2 multiplications per pair of channels. The product of two spectra of
n x n, n = m + k - 1, takes about 2 n^2: 448 instead of 2,500 for a 5x5 kernel on 14x14 pixels. At this size the fastest
transform is a product with the matrix of the transform, one axis after the other. The whole layer is then matrix
products, which autograd, vmap and compilers support.
"""

from collections.abc import Sequence
from math import ceil, tau

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Matrix = NDArray[np.float64]

SPEED_RATIO = 2
"""How many times faster a multiplication is in a direct convolution than in the products of spectra."""


def convolution(
    inputs: int, outputs: int, side: int, image: tuple[int, int], *, padding: int = 0, bias: bool = True
) -> nn.Conv2d:
    """Return a convolution of stride 1 for images of a fixed size, with the Fourier transform if it can be faster."""
    if min_batch(inputs, outputs, side, image, padding) is None:
        return nn.Conv2d(inputs, outputs, side, padding=padding, bias=bias)
    return FourierConv2d(inputs, outputs, side, image, padding=padding, bias=bias)


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
    if min(image) + 2 * padding < side:
        return None
    pairs, frequencies = inputs * outputs, rows // 2 + 1
    direct = pairs * side**2 * (height + 2 * padding - side + 1) * (width + 2 * padding - side + 1)
    spectra = pairs * 4 * frequencies * columns
    transforms = (inputs + outputs) * 2 * frequencies * width * (height + 2 * columns)
    saved = direct - SPEED_RATIO * (spectra + transforms)
    kernel_transform = pairs * 2 * frequencies * side * (side + 2 * columns)  # once per minibatch
    return None if saved <= 0 else ceil(SPEED_RATIO * kernel_transform / saved)


class FourierConv2d(nn.Conv2d):
    """nn.Conv2d to rounding, faster on a CPU if the minibatch is large enough.

    On other devices, for smaller minibatches and for images of another size it computes exactly what nn.Conv2d does.
    The spectrum of a real signal is symmetric: (rows // 2 + 1) x columns frequencies of a period are enough, each with
    a real and an imaginary part.
    """

    def __init__(
        self, inputs: int, outputs: int, side: int, image: tuple[int, int], *, padding: int = 0, bias: bool = True
    ):
        super().__init__(inputs, outputs, side, padding=padding, bias=bias)
        self.image, self.min_batch = image, min_batch(inputs, outputs, side, image, padding) or 1
        period = _period(image, padding)
        self.frequencies = period[0] // 2 + 1
        self.image_transform = _forward([range(length) for length in image], period, sign=-1)
        kernel = range(-padding, side - padding)
        self.kernel_transform = _forward([kernel, kernel], period, sign=1)  # conjugate: the layer is a correlation
        self.inverse_transform = _inverse([range(length + 2 * padding - side + 1) for length in image], period)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-2:] != self.image or input.dim() != 4 or len(input) < self.min_batch:
            return super().forward(input)
        if input.device.type != "cpu" or input.dtype != torch.float32:
            return super().forward(input)
        images, images_i = self._spectra(self.image_transform, input.permute(2, 3, 0, 1))
        kernels, kernels_i = self._spectra(self.kernel_transform, self.weight.permute(2, 3, 1, 0))
        real = torch.baddbmm(torch.bmm(images, kernels), images_i, kernels_i, alpha=-1)
        imaginary = torch.baddbmm(torch.bmm(images, kernels_i), images_i, kernels)
        across, down = self.inverse_transform
        spectra = torch.stack((real, imaginary), 1).view(self.frequencies, across.shape[1], -1)
        output = (down @ (across @ spectra).view(2 * self.frequencies, -1)).view(len(down), -1, *real.shape[1:])
        if self.bias is not None:
            output = output + self.bias
        if input.stride(1) == 1:  # channels last, by operations that vmap supports
            return output.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)
        return output.permute(2, 3, 0, 1).contiguous()

    def _spectra(self, matrices: tuple[Tensor, Tensor], signals: Tensor) -> tuple[Tensor, ...]:
        """Transform signals (row, column, ...) to the real and the imaginary part, one matrix per frequency."""
        down, across = matrices
        rows, columns, *rest = signals.shape
        halfway = (down @ signals.reshape(rows, -1)).view(self.frequencies, 2 * columns, -1)
        return (across @ halfway).view(-1, 2, *rest).unbind(1)


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
