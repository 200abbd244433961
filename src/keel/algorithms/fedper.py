"""Personal layers that never leave the client.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. Federated Learning with Personalization Layers. 2019.
arXiv:1912.00818.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Message, Path, Report, State
from keel.errors import KeelError


@hyperparameters
class FedPer(Algorithm):
    """FedAvg of the first layers of the model, the base b; each client keeps its last layers, the personal part p_i.

    client:  w starts at (b, p_i);  u = g
    state:   w_i after the last step, of which p_i is read
    server:  b <- b - eta mean(b - b_i)

    p_i is the last `personal_tensors` parameter tensors, by default the weight and the bias of the last layer. Only b
    is sent, down and up. The server's model has the initial personal part. personal_tensors = 0 is FedAvg.
    """

    name = "fedper"
    title = "FedPer"
    paper = "Arivazhagan et al., 2019"
    mean_suffices = True

    personal_tensors: Annotated[int, Field(ge=0)] = 2

    def init_client(self, theta: Tensor) -> State:
        return {"model": theta}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"base": server["theta"][: self._base(ctx.sizes)]}

    def start(self, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return self._joined(received["base"], state["model"], ctx.sizes)

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        return {"delta": (path.start - path.end)[..., : self._base(ctx.sizes)]}, {"model": path.end}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        theta = server["theta"]
        base = theta[: self._base(ctx.sizes)] - ctx.server_lr * weighted_mean(reports)["delta"]
        return {"theta": self._joined(base, theta, ctx.sizes)}

    def personal_model(self, theta: Tensor, state: State, sizes: Sequence[int]) -> Tensor:
        return self._joined(theta[: self._base(sizes)], state["model"], sizes)

    def _joined(self, base: Tensor, model: Tensor, sizes: Sequence[int]) -> Tensor:
        """The base, followed by the personal part of a model or, in a batched cohort, of each row."""
        personal = model[..., self._base(sizes) :]
        return torch.cat([base.expand(*personal.shape[:-1], -1), personal], dim=-1)

    def _base(self, sizes: Sequence[int]) -> int:
        """The number of elements of the base."""
        if self.personal_tensors >= len(sizes):
            raise KeelError(
                f"algorithm.personal_tensors must be less than the number of the model's parameter tensors, "
                f"{len(sizes)} (got {self.personal_tensors})"
            )
        return sum(sizes[: len(sizes) - self.personal_tensors])
