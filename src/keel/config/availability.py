"""The table `[availability]` of a spec: which clients of a cohort answer in a simulation."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AvailabilitySpec(BaseModel):
    """Drop-out, a deadline, and clients that are online by day."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The probability that a client receives the broadcast and does not answer."""
    deadline: Annotated[float, Field(gt=0)] | None = None
    """The seconds that the server waits for answers; the time of a client is that of `[network]`."""
    step_seconds: Annotated[float, Field(gt=0)] | None = None
    """The computing time of a local step on a device of median speed."""
    diurnal_rounds: Annotated[float, Field(gt=1)] | None = None
    """The rounds of a day, over which the probability that a client is online is a cosine."""
    diurnal_least: Annotated[float, Field(ge=0, le=1)] | None = None
    """The probability that a client is online at its worst hour."""
    diurnal_spread: Annotated[float, Field(ge=0, le=1)] | None = None
    """The part of a day over which the best hours of the clients are spread."""

    @model_validator(mode="after")
    def _consistent(self) -> "AvailabilitySpec":
        if self.deadline is not None and self.step_seconds is None:
            raise ValueError(
                f"deadline requires step_seconds, the computing time of a local step (got deadline = {self.deadline:g} "
                "alone)"
            )
        for field in ("diurnal_least", "diurnal_spread"):
            if getattr(self, field) is not None and self.diurnal_rounds is None:
                raise ValueError(f"{field} requires diurnal_rounds, the rounds of a day")
        return self
