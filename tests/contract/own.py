"""An algorithm of a user's own: one class, no edit inside the package."""

from torch import Tensor

import keel


@keel.hyperparameters
class Lookahead(keel.Algorithm):
    """FedAvg whose clients remember where they went last time and lean a little that way again."""

    name = "lookahead"
    title = "Lookahead"
    paper = "none"

    lean: float = 0.1

    def init_client(self, theta: Tensor) -> dict[str, Tensor]:
        return {"went": 0 * theta}

    def direction(self, w, gradient, received, memory, ctx):  # type: ignore[no-untyped-def]
        return gradient(w) + self.lean * memory["went"] / (ctx.lr * ctx.steps)

    def report(self, path, received, memory, ctx):  # type: ignore[no-untyped-def]
        delta = path.start - path.end
        return {"delta": delta}, {"went": delta}
