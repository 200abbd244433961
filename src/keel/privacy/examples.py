"""Example-level privacy at a client: DP-SGD with vectorised gradients of single examples.

M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang. Deep Learning with Differential
Privacy. CCS 2016. A minibatch is a Poisson sample of the client's examples.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from keel.core.flat_model import FlatModel, Loss
from keel.core.losses import batched_loss
from keel.core.mechanisms import Sender
from keel.privacy.clipping import Draw, keyed_noise


@dataclass(frozen=True)
class PrivateGradient:
    """(sum of the clipped gradients of the examples + noise * clip * N(0, 1)) / batch.

    Args:
        batch: The expected number of examples of a minibatch, which is the denominator.
        chunk: Examples whose gradients are computed together; None for all.
        secret: Draws the noise, as in `ClipReport`. The minibatches are then secret as well: the bound of a Poisson
            sample does not hold against a server that can repeat it.
    """

    clip: float
    noise: float
    batch: int
    chunk: int | None = None
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
        total, mean_loss = torch.zeros_like(point), point.new_zeros(())
        if len(targets):
            losses, gradients = self._of_examples(model, loss, point, inputs, targets)
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            finite = torch.where(torch.isfinite(norms), gradients, 0.0)
            total, mean_loss = (finite * (self.clip / norms).clamp(max=1.0).nan_to_num(0.0)).sum(0), losses.mean()
        if self.noise:
            draw = self.secret or keyed_noise(sender.rng(f"privacy gradient {number}"))
            total = total + self.noise * self.clip * draw(total.cpu()).to(total.device)
        return mean_loss.detach(), total / self.batch

    def _of_examples(
        self, model: FlatModel, loss: Loss, point: Tensor, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss and the gradient of each example."""
        batched = batched_loss(loss)

        def of_one(weights: Tensor, example: Tensor, target: Tensor) -> Tensor:
            return batched(model.at(weights, example[None]), target[None])[0]

        each = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different", chunk_size=self.chunk)
        gradients, losses = each(point, inputs.contiguous(), targets)
        return losses, gradients
