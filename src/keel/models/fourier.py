"""Convolution of small images through the Fourier transform, as matrix products.

A k x k convolution with m x m outputs takes k^2 m^2 multiplications for each pair of channels, the product of two
spectra of n x n, n = m + k - 1, about 2 n^2: 448 in place of 2,500 for 5x5 over 14x14. Images of this size are
transformed fastest by the matrix of the transform, one axis after the other, so that all of it is products of matrices,
which autograd, vmap and compilers know.
"""

from collections.abc import Sequence
from math import ceil, tau

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Matrix = NDArray[np.float64]

WORTH = 2
"""How many times fewer multiplications take as long: those of a direct convolution are made faster."""


def convolution(
    inputs: int, outputs: int, side: int, image: tuple[int, int], *, padding: int = 0, bias: bool = True
) -> nn.Conv2d:
    """A layer of stride 1 for images of one size, by way of the spectra where that can be worth it."""
    if fewest(inputs, outputs, side, image, padding) is None:
        return nn.Conv2d(inputs, outputs, side, padding=padding, bias=bias)
    return FourierConv2d(inputs, outputs, side, image, padding=padding, bias=bias)


def fewest(inputs: int, outputs: int, side: int, image: tuple[int, int], padding: int = 0) -> int | None:
    """Images in a minibatch from which on spectra take less time, by the number of multiplications; None: never."""
    (height, width), (rows, columns) = image, _period(image, padding)
    if min(image) + 2 * padding < side:
        return None
    pairs, frequencies = inputs * outputs, rows // 2 + 1
    direct = pairs * side**2 * (height + 2 * padding - side + 1) * (width + 2 * padding - side + 1)
    spectra = pairs * 4 * frequencies * columns
    transforms = (inputs + outputs) * 2 * frequencies * width * (height + 2 * columns)
    saved = direct - WORTH * (spectra + transforms)
    of_kernels = pairs * 2 * frequencies * side * (side + 2 * columns)  # once, however many images there are
    return None if saved <= 0 else ceil(WORTH * of_kernels / saved)


class FourierConv2d(nn.Conv2d):
    """The same layer as nn.Conv2d to rounding; on a CPU in less time where a minibatch is large enough.

    Elsewhere, for smaller minibatches and for images of another size it is nn.Conv2d itself. A spectrum has
    (rows // 2 + 1) x columns frequencies of a period, since that of real numbers repeats itself, and of each its real
    and imaginary part.
    """

    def __init__(
        self, inputs: int, outputs: int, side: int, image: tuple[int, int], *, padding: int = 0, bias: bool = True
    ):
        super().__init__(inputs, outputs, side, padding=padding, bias=bias)
        self.image, self.fewest = image, fewest(inputs, outputs, side, image, padding) or 1
        period = _period(image, padding)
        self.frequencies = period[0] // 2 + 1
        self.of_images = _there([range(length) for length in image], period, sign=-1)
        kernel = range(-padding, side - padding)
        self.of_kernels = _there([kernel, kernel], period, sign=1)  # conjugate: a layer correlates
        self.back = _back([range(length + 2 * padding - side + 1) for length in image], period)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-2:] != self.image or input.dim() != 4 or len(input) < self.fewest:
            return super().forward(input)
        if input.device.type != "cpu" or input.dtype != torch.float32:
            return super().forward(input)
        images, images_i = self._spectra(self.of_images, input.permute(2, 3, 0, 1))
        kernels, kernels_i = self._spectra(self.of_kernels, self.weight.permute(2, 3, 1, 0))
        real = torch.baddbmm(torch.bmm(images, kernels), images_i, kernels_i, alpha=-1)
        imaginary = torch.baddbmm(torch.bmm(images, kernels_i), images_i, kernels)
        across, down = self.back
        spectra = torch.stack((real, imaginary), 1).view(self.frequencies, across.shape[1], -1)
        made = (down @ (across @ spectra).view(2 * self.frequencies, -1)).view(len(down), -1, *real.shape[1:])
        if self.bias is not None:
            made = made + self.bias
        if input.stride(1) == 1:  # channels last, in words that vmap knows
            return made.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)
        return made.permute(2, 3, 0, 1).contiguous()

    def _spectra(self, matrices: tuple[Tensor, Tensor], signals: Tensor) -> tuple[Tensor, ...]:
        """The real and the imaginary parts, a matrix for each frequency, of (row, column, ...)."""
        down, across = matrices
        rows, columns, *rest = signals.shape
        halfway = (down @ signals.reshape(rows, -1)).view(self.frequencies, 2 * columns, -1)
        return (across @ halfway).view(-1, 2, *rest).unbind(1)


def _period(image: tuple[int, int], padding: int) -> tuple[int, int]:
    """After which an image comes again: so that what reaches beyond one edge sees zeros, not the other edge."""
    return image[0] + padding, image[1] + padding


def _there(places: Sequence[range], period: tuple[int, int], sign: int) -> tuple[Tensor, Tensor]:
    """From (row, column) to (frequency, part, column), and from there to (frequency, frequency, part)."""
    cosines, sines = _waves(period[0] // 2 + 1, places[0], period[0])
    down = np.stack((cosines, sign * sines), 1)
    cosines, sines = _waves(period[1], places[1], period[1])
    across = np.stack((np.hstack((cosines, -sign * sines)), np.hstack((sign * sines, cosines))), 1)
    return _tensor(down.reshape(-1, len(places[0]))), _tensor(across.reshape(-1, 2 * len(places[1])))


def _back(places: Sequence[range], period: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """From (frequency, frequency, part) to (frequency, part, column), and from there to (row, column)."""
    cosines, sines = (each.T for each in _waves(period[1], places[1], period[1]))
    across = np.vstack((np.stack((cosines, -sines), 2), np.stack((sines, cosines), 2)))
    cosines, sines = (each.T for each in _waves(period[0] // 2 + 1, places[0], period[0]))
    frequencies = np.arange(period[0] // 2 + 1)
    twice = np.where(2 * frequencies % period[0] == 0, 1, 2) / (period[0] * period[1])  # for those left out
    down = np.stack((cosines * twice, -sines * twice), 2)
    return _tensor(across.reshape(2 * len(places[1]), -1)), _tensor(down.reshape(len(places[0]), -1))


def _waves(frequencies: int, places: range, period: int) -> tuple[Matrix, Matrix]:
    angles = tau / period * (np.outer(np.arange(frequencies), np.array(places)) % period)
    return np.cos(angles), np.sin(angles)


def _tensor(matrix: Matrix) -> Tensor:
    return torch.from_numpy(matrix.astype(np.float32))
