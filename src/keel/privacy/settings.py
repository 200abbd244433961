"""The table `[privacy]` of a spec, and which algorithms and samplers it can be combined with."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from keel.algorithms.base import Algorithm
from keel.errors import KeelError
from keel.privacy.accounting import Accountant, Sampling

Mechanism: TypeAlias = Literal["central", "local", "tree", "example"]
Mean: TypeAlias = Literal["median", "trimmed_mean", "geometric_median"]
Positive = Annotated[float, Field(gt=0)]
SAMPLINGS: dict[str, Sampling] = {"poisson": "poisson", "uniform": "fixed", "cyclic": "none"}
"""What is proven for the built-in samplers of clients."""


class PrivacySpec(BaseModel):
    """Differential privacy. `epsilon` alone sets the noise; with `noise` it is a budget that ends the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    mechanism: Mechanism = "central"
    clip: Positive
    noise: Annotated[float, Field(ge=0)] | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)]
    accountant: Accountant = "rdp"
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip_lr: Positive | None = None
    bit_noise: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "PrivacySpec":
        if self.noise is None and self.epsilon is None:
            raise ValueError("noise or epsilon must be set: the noise multiplier, or the budget that sets it")
        if self.quantile is not None and self.mechanism != "central":
            raise ValueError(f"quantile requires mechanism = 'central' (got {self.mechanism!r}); remove it")
        for field in ("clip_lr", "bit_noise"):
            if getattr(self, field) is not None and self.quantile is None:
                raise ValueError(f"{field} requires quantile, which makes the clipping norm adaptive")
        if self.mechanism in ("tree", "example") and self.accountant == "pld":
            raise ValueError(f"accountant = 'pld' does not support mechanism = {self.mechanism!r}; use 'rdp'")
        return self

    @property
    def hides_losses(self) -> bool:
        """Whether the server is not trusted with what a report does not protect: a site's training loss."""
        return self.mechanism in ("local", "example")

    def check_sampler(self, sampler: str) -> None:
        """Raise a KeelError unless a bound is proven for clients that are sampled by this sampler."""
        if self.mechanism == "tree" and sampler != "cyclic":
            raise KeelError(
                f"privacy.mechanism = 'tree' requires participation.sampler = 'cyclic', in which a client is in a tree "
                f"once (got {sampler!r})"
            )
        if self.mechanism == "central" and sampler not in SAMPLINGS:
            raise KeelError(
                f"privacy.mechanism = 'central' requires participation.sampler = 'poisson', 'uniform' or 'cyclic', for "
                f"which a bound is proven (got {sampler!r})"
            )
        if self.mechanism == "central" and self.accountant == "pld" and sampler == "uniform":
            raise KeelError(
                "privacy.accountant = 'pld' has no bound for participation.sampler = 'uniform'; use 'poisson' or "
                "accountant = 'rdp'"
            )

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Raise a KeelError if the mechanism does not make this algorithm private."""
        name, field = algorithm.name, f"privacy.mechanism = {self.mechanism!r}"
        if algorithm.pooled:
            raise KeelError(f"{field} requires clients, which {name} pools; use another algorithm")
        if algorithm.probes:
            raise KeelError(
                f"{field} does not support {name}: its first phase releases full gradients as well; use ghbm"
            )
        if self.mechanism == "example":
            if "full_gradient" in algorithm.observes:
                raise KeelError(f"{field} does not support {name}: it reads the full gradient of a client's examples")
            return
        if algorithm.unclippable:
            raise KeelError(f"{field} does not support {name}: {algorithm.unclippable}")
        if self.mechanism != "local" and not algorithm.mean_suffices:
            raise KeelError(f"{field} does not support {name}: {NEEDS_EACH}")


NEEDS_EACH = "its server needs each report or each client's number of steps, not only the mean"


def check_mean(mean: Mean, algorithm: Algorithm) -> None:
    """Raise a KeelError if a robust mean cannot take the place of the mean in this algorithm."""
    field = f"server.mean = {mean!r}"
    if algorithm.pooled:
        raise KeelError(f"{field} requires clients, which {algorithm.name} pools; remove it")
    if algorithm.probes:
        raise KeelError(f"{field} does not support {algorithm.name}: its first phase takes another mean; remove it")
    if not algorithm.mean_suffices:
        raise KeelError(f"{field} does not support {algorithm.name}: {NEEDS_EACH}; remove it")
