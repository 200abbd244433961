"""Replies of sites that the server must not use. It imports no PyTorch: a site's node starts without it."""


class InvalidReply(ValueError):
    """A reply that the server must not use; the text says why, in one line: it may quote the site."""

    def __init__(self, reason: object):
        super().__init__(one_line(reason))


def one_line(text: object) -> str:
    """Return text that came from a site as one line of up to 300 characters."""
    return " ".join(str(text).split())[:300]
