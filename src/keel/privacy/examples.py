"""Example-level privacy at a client: DP-SGD with vectorised gradients of single examples.

M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang. Deep Learning with Differential
Privacy. CCS 2016. A minibatch is a Poisson sample of the client's examples.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keel.core.flat_model import FlatModel, Loss
from keel.core.mechanisms import Sender
from keel.privacy.layers import layer_by_layer, whole_model
from keel.privacy.noise import Draw, keyed_noise

STORED = 1 << 26
"""Elements of gradients that are computed together, unless the number of examples is given."""


@dataclass(frozen=True)
class PrivateGradient:
    """(sum of the clipped gradients of the examples + noise * clip * N(0, 1)) / batch.

    Args:
        batch: The expected number of examples of a minibatch, which is the denominator.
        chunk: Examples whose gradients are computed together; by default as many as fit in 256 MB.
        layered: Whether the gradients are computed layer by layer, which takes a fraction of the time.
        secret: Draws the noise, as in `ClipReport`. The minibatches are then secret as well: the bound of a Poisson
            sample does not hold against a server that can repeat it.
    """

    clip: float
    noise: float
    batch: int
    chunk: int | None = None
    layered: bool = False
    secret: Draw | None = None

    def minibatches(self, examples: int, steps: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Poisson samples of a client's examples; they may be empty."""
        if self.secret is not None:
            rng = np.random.default_rng()  # seeded by the operating system
        return [np.flatnonzero(rng.random(examples) < self.batch / examples) for _ in range(steps)]

    def gradient(
        self, model: FlatModel, loss: Loss, point: Tensor, inputs: Tensor, targets: Tensor, sender: Sender, number: int
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of a minibatch, which is not private, and its private gradient.

        Args:
            number: Distinguishes the gradients of a round.
        """
        of_examples = layer_by_layer if self.layered else whole_model
        total, sum_of_losses, count = torch.zeros_like(point), point.new_zeros(()), len(targets)
        size = self.chunk or max(1, STORED // point.numel())
        for some, of_them in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
            if not len(of_them):
                continue
            losses, gradients = of_examples(model, loss, point, some, of_them)
            sum_of_losses += losses.sum()
            total += gradients.weighted_sum(clipping_factors(gradients.norms, self.clip))
        if self.noise:
            draw = self.secret or keyed_noise(sender.rng(f"privacy gradient {number}"))
            total = total.add_(draw(total.cpu()).to(total.device), alpha=self.noise * self.clip)
        return sum_of_losses / max(1, count), total.div_(self.batch)


def clipping_factors(norms: Tensor, clip: float) -> Tensor:
    """What scales gradients to a norm of at most `clip`; 0 for those that are not finite."""
    return torch.where(torch.isfinite(norms), (clip / norms).clamp(max=1.0), 0.0)
