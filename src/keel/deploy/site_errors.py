"""Errors that leave a site: a code and the class of the exception. The text may quote a cell and stays in the log."""

from collections.abc import Iterator
from contextlib import contextmanager

from keel.deploy.versions import VERSION, OtherVersion
from keel.errors import KeelError

MAX_NAME = 64


class SiteError(Exception):
    """An exception with the code under which the server gets it."""

    def __init__(self, code: str, cause: BaseException):
        super().__init__(f"{code}: {cause}")
        self.code, self.cause = code, cause


class PolicyRefusal(KeelError):
    """The site's policy does not allow a request."""

    def __init__(self, field: str, text: str):
        super().__init__(f"site.toml: {field}: {text}")
        self.field = field


class RequestTimeout(BaseException):
    """A request has taken longer than the policy allows. Not an Exception, so that no loader catches it by mistake."""


@contextmanager
def coded(code: str) -> Iterator[None]:
    """Give exceptions of the block a code, unless they have one."""
    try:
        yield
    except (SiteError, PolicyRefusal):
        raise
    except Exception as error:
        raise SiteError(code, error) from error


def code_of(error: BaseException) -> str:
    if isinstance(error, PolicyRefusal):
        return f"policy:{error.field}"
    if isinstance(error, SiteError):
        return error.code
    if isinstance(error, OtherVersion):
        return f"{VERSION}:{error.here}"
    return "timeout" if isinstance(error, RequestTimeout) else "internal"


def reason_of(error: BaseException) -> str:
    """Return what the server gets of an error: `CODE: ExceptionClass`."""
    name = type(error.cause if isinstance(error, SiteError) else error).__name__
    return f"{code_of(error)}: {name if name.isidentifier() and name.isascii() else 'Exception'}"[:MAX_NAME]
