"""The names of the partitioning schemes, and which fields of a spec belong to which of them."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

from keel.errors import KeelError

PartitionScheme = Literal["dirichlet", "dirichlet_per_class", "classes", "shards", "quantity", "feature", "iid", "key"]

SCHEMES_WITH: dict[str, tuple[PartitionScheme, ...]] = {
    "alpha": ("dirichlet", "dirichlet_per_class", "quantity"),
    "classes_per_client": ("classes",),
    "shards_per_client": ("shards",),
    "noise": ("feature",),
    "min_examples": ("key", "dirichlet_per_class", "quantity"),
}
"""The schemes that each field applies to."""
IMPLIED: dict[str, PartitionScheme] = {
    "alpha": "dirichlet",
    "classes_per_client": "classes",
    "shards_per_client": "shards",
    "noise": "feature",
}
"""The scheme that a field implies if none is named."""
REQUIRED: dict[PartitionScheme, str] = {
    "dirichlet_per_class": "alpha",
    "quantity": "alpha",
    "classes": "classes_per_client",
    "feature": "noise",
}
"""The field without which a scheme has no meaning."""
SHARDS_PER_CLIENT = 2
"""The default of data.shards_per_client, that of McMahan et al. (2017)."""


def check_fields(scheme: PartitionScheme | None, fields: Mapping[str, Any]) -> None:
    """Raise a KeelError unless the fields that are not None are those of the scheme and have valid values."""
    for field, schemes in SCHEMES_WITH.items():
        if fields.get(field) is not None and scheme not in schemes:
            *others, last = map(repr, schemes)
            allowed = f"{', '.join(others)} or {last}" if others else last
            raise KeelError(f"data.{field} = {fields[field]} requires data.partition = {allowed} (got {scheme!r})")
    required = REQUIRED.get(scheme) if scheme is not None else None
    if required is not None and fields.get(required) is None:
        raise KeelError(f"data.{required} must be set for data.partition = {scheme!r}")
    for field in ("classes_per_client", "shards_per_client", "min_examples"):
        if (count := fields.get(field)) is not None and not (isinstance(count, int) and count >= 1):
            raise KeelError(f"data.{field} must be a whole number from 1 (got {count!r})")
    if required in ("alpha", "noise") and not (isfinite(fields[required]) and fields[required] > 0):
        raise KeelError(
            f"data.{required} must be greater than 0 for data.partition = {scheme!r} (got {fields[required]})"
        )


def implied_by(fields: Mapping[str, Any]) -> PartitionScheme | None:
    """Return the scheme that the first field that is not None implies."""
    return next((scheme for field, scheme in IMPLIED.items() if fields.get(field) is not None), None)
