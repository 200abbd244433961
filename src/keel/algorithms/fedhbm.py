"""The paper's communication-efficient method of choice: LocalGHBM with the client's own models in it.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone. Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025. Section "Communication Complexity of GHBM and Efficient Variants".
"""

from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import Fraction, Memory, Message, Path, hyperparameters
from keel.algorithms.localghbm import LocalGHBM


@hyperparameters
class FedHBM(LocalGHBM):
    """LocalGHBM that anchors at the model the client sent last time and compares with the current local model.

    client:  u = g + beta (a - w) / (tau_i l J),  a the model sent in the client's last round, w the current one
    memory:  a <- w after the last step

    A client in its first round has no momentum, or with anchor = "shared_init" one that starts at the initial
    model, which all parties know.
    """

    name = "fedhbm"
    title = "FedHBM"

    beta: Fraction = 1.0
    anchor: Literal["own", "shared_init"] = "own"

    def init_client(self, theta: Tensor) -> Memory:
        memory = super().init_client(theta)
        return memory if self.anchor == "own" else {**memory, "seen": torch.ones(1)}

    def _current(self, w: Tensor, received: Message) -> Tensor:
        return w

    def _anchor(self, path: Path) -> Tensor:
        return path.end
