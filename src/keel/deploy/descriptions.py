"""Descriptions: what a site states about its data and its model before the first round, and the checks of it."""

import re
from math import prod
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from keel.deploy.invalid_reply import InvalidReply, one_line
from keel.deploy.messages import REPLY
from keel.deploy.versions import SOFTWARE
from keel.engines import Dropped

Description = dict[str, Any]
"""site, examples, test_examples, classes, shape, target_shape, moving (names of the buffers that training changes),
model (checksum), fingerprint (keyed, of the data), keel, torch, flower (versions), app (hash of the approved code); the
server adds node and joined, the number of rounds before the site joined."""
INTEGER_RANGES = {"site": (0, 2**31), "examples": (1, 2**40), "test_examples": (0, 2**40), "classes": (0, 2**24)}
TEXTS = {
    "model": (re.compile(r"[0-9a-f]{64}"), "the SHA-256 of the model"),
    "fingerprint": (re.compile(r"[0-9a-f]{64}"), "a fingerprint of the data with 64 hexadecimal digits"),
    "app": (re.compile(r"([0-9a-f]{64})?"), "the SHA-256 of the approved app, or empty"),
    **dict.fromkeys(SOFTWARE, (re.compile(r"[\w.+!-]{1,64}"), "a version")),
}
BOUND = ("examples", "test_examples", "classes", "shape", "target_shape", "moving", "model")
"""Fields that stay as they were when the site joined. `fingerprint` does too, unless `federation.allow_new_data`."""
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
    for name, (pattern, meaning) in TEXTS.items():
        value = fields.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise InvalidReply(f"{prefix}{name} must be {meaning} (got {one_line(repr(value))})")
    return {name: fields[name] for name in (*INTEGER_RANGES, *LISTS, *TEXTS)}


def _is_shape(sizes: list[int]) -> bool:
    return len(sizes) <= MAX_DIMENSIONS and min(sizes, default=1) >= 1 and prod(sizes) <= MAX_ELEMENTS
