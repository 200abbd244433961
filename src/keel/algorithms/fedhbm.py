"""The paper's recommended method: LocalGHBM anchored at the client's own local models.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone. Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025. Section "Communication Complexity of GHBM and Efficient Variants".
"""

from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import hyperparameters
from keel.algorithms.localghbm import LocalGHBM
from keel.algorithms.types import Fraction, Message, Path, State


@hyperparameters
class FedHBM(LocalGHBM):
    """LocalGHBM whose anchor is the model that the client sent last, compared with the current local model.

    client:  u = g, d = -beta (a - w) / (tau_i J),  a the model sent in the client's last round, w the current one
    state:   a <- w after the last step

    A client in its first round has no momentum; with anchor = "shared_init" its anchor is the initial model, which
    all clients have.
    """

    name = "fedhbm"
    title = "FedHBM"

    beta: Fraction = 1.0
    anchor: Literal["own", "shared_init"] = "own"

    def init_client(self, theta: Tensor) -> State:
        state = super().init_client(theta)
        return state if self.anchor == "own" else {**state, "seen": torch.ones_like(state["seen"])}

    def _current(self, w: Tensor, received: Message) -> Tensor:
        return w

    def _anchor(self, path: Path) -> Tensor:
        return path.end
