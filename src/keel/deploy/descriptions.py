"""Descriptions: what a site states about its data and its model before the first round, and the checks of it."""

from math import prod
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from keel.deploy.messages import REPLY, InvalidReply, one_line
from keel.engines import Dropped

Description = dict[str, Any]
"""site, examples, classes, shape, target_shape, moving (names of the buffers that training changes), model (checksum);
the server adds node."""
INTEGER_RANGES = {"site": (0, 2**31), "examples": (1, 2**40), "classes": (0, 2**24)}
LISTS = {"shape": int, "target_shape": int, "moving": str}
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 2**28
"""Largest number of elements of one example."""


def read_description(reply: RecordDict | Dropped) -> Description:
    """Return the description in a site's reply.

    Raises:
        InvalidReply: The reply has no description, or a field has a wrong type or is out of range.
    """
    if isinstance(reply, Dropped):
        raise InvalidReply(reply.reason)
    record = reply.get(REPLY)
    if not isinstance(record, ConfigRecord):
        raise InvalidReply("sent no description of its data")
    fields: dict[str, Any] = dict(record)
    prefix = f"site {fields['site']}: " if type(fields.get("site")) is int else ""
    for name, (low, high) in INTEGER_RANGES.items():
        if type(fields.get(name)) is not int or not low <= fields[name] <= high:
            raise InvalidReply(f"{prefix}{name} must be an integer from {low} to {high} (got {fields.get(name)!r})")
    for name, kind in LISTS.items():
        value = fields.get(name)
        if not isinstance(value, list) or not all(type(part) is kind for part in value):
            raise InvalidReply(f"{prefix}{name} must be a list of {kind.__name__} (got {one_line(value)})")
        if kind is int and not _is_shape(value):
            raise InvalidReply(
                f"{prefix}{name} must have positive sizes and up to {MAX_ELEMENTS} elements (got {one_line(value)})"
            )
    if not isinstance(fields.get("model"), str):
        raise InvalidReply(f"{prefix}sent no checksum of its model")
    return {name: fields[name] for name in (*INTEGER_RANGES, *LISTS, "model")}


def _is_shape(sizes: list[int]) -> bool:
    return len(sizes) <= MAX_DIMENSIONS and min(sizes, default=1) >= 1 and prod(sizes) <= MAX_ELEMENTS
