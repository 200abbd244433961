"""An algorithm outside the package, as a user writes one."""

from torch import Tensor

import keel


@keel.hyperparameters
class Lookahead(keel.Algorithm):
    """FedAvg whose clients add a share of their last update to each local step."""

    name = "lookahead"
    title = "Lookahead"
    paper = "none"
    mean_suffices = True

    lean: float = 0.1

    def init_client(self, theta: Tensor) -> dict[str, Tensor]:
        return {"update": 0 * theta}

    def direction(self, w, gradient, received, state, ctx):  # type: ignore[no-untyped-def]
        return gradient(w) + self.lean * state["update"] / (ctx.lr * ctx.steps)

    def report(self, path, received, state, ctx):  # type: ignore[no-untyped-def]
        delta = path.start - path.end
        return {"delta": delta}, {"update": delta}
