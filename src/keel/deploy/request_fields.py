"""The fields of a server's request, as a site reads them. A field that is missing or of a wrong type is a KeelError."""

import tomllib
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from keel.deploy.messages import REQUEST
from keel.errors import KeelError, shown


def request_record(content: RecordDict) -> ConfigRecord:
    """Return the record with the parameters of a request."""
    record = content.get(REQUEST)
    if not isinstance(record, ConfigRecord):
        raise KeelError(f"the request has no record {REQUEST!r}")
    return record


def read_text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise KeelError(f"{name} of the request must be a text (got {shown(value)})")
    return value


def read_integer(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or value < 0:
        raise KeelError(f"{name} of the request must be an integer from 0 (got {shown(value)})")
    return value


def read_table(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table that the request has as TOML."""
    try:
        return tomllib.loads(read_text(request, name))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise KeelError(f"{name} of the request must be TOML ({shown(str(error))})") from None


def origin_of(request: Mapping[str, Any]) -> ConfigRecord:
    """Return what a reply repeats of its request: the ID of the run and the round."""
    return ConfigRecord({"training": read_text(request, "training"), "round": read_integer(request, "round")})
