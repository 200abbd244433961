"""The table `[compression]` of a spec: how reports and broadcasts are encoded."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SPARSE = ("top_k", "random_k")
FRACTION = 0.05


class CompressionSpec(BaseModel):
    """The codecs of both directions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    up: Literal["top_k", "random_k", "int8", "int4", "sign"] | None = None
    """The codec of the clients' reports."""
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """The part of the elements that `top_k` and `random_k` send; 0.05 by default."""
    error_feedback: bool | None = None
    """Whether a client adds to a report what the encoding of its last one lost; true by default."""
    down: Literal["int8", "int4"] | None = None
    """The codec of the server's broadcasts."""

    @model_validator(mode="before")
    @classmethod
    def _dense_broadcasts(cls, table: object) -> object:
        down = table.get("down") if isinstance(table, dict) else None
        if down in (*SPARSE, "sign"):
            raise ValueError(
                f"down must be 'int8' or 'int4' (got {down!r}): a broadcast is a whole model, and an idle client has "
                "no earlier one to which a sparse difference could be added"
            )
        return table

    @model_validator(mode="after")
    def _consistent(self) -> "CompressionSpec":
        if self.up is None and self.down is None:
            raise ValueError("up or down must be set, the codec of reports or of broadcasts")
        if self.fraction is not None and self.up not in SPARSE:
            raise ValueError(f"fraction requires up = 'top_k' or 'random_k' (got up = {self.up!r})")
        if self.error_feedback is not None and self.up is None:
            raise ValueError("error_feedback requires up, the codec of reports")
        return self

    @property
    def feeds_back(self) -> bool:
        return self.up is not None and self.error_feedback is not False
