"""Versions that the machines of a federation exchange when a site joins, and which of them must be equal."""

from collections.abc import Mapping
from importlib.metadata import version

from packaging.version import InvalidVersion, Version

from keel.deploy.invalid_reply import InvalidReply

SOFTWARE = {"keel": "Keel", "torch": "torch", "flower": "Flower"}
"""Fields of a description with the name that people use."""
PACKAGES = {"keel": "keel-fl", "torch": "torch", "flower": "flwr"}


def installed_versions() -> dict[str, str]:
    """Return the versions on this machine."""
    return {name: version(package) for name, package in PACKAGES.items()}


VERSION = "version"
"""Code of the error of a site that has another version of Keel than the server; the site's version follows it."""


class OtherVersion(Exception):
    """The server has another version of Keel than this site."""

    def __init__(self, server: str, here: str):
        super().__init__(f"the server has Keel {server}, this site has {here}; install the same version")
        self.here = here


def check_server_version(server: str) -> None:
    """Check at a site that the server has its version of Keel, before anything else of a request is read.

    Raises:
        OtherVersion: It has not.
    """
    here = installed_versions()["keel"]
    if server != here:
        raise OtherVersion(server, here)


def check_versions(site: int, versions: Mapping[str, str]) -> None:
    """Check a site's versions against those of the server.

    Keel must be equal; torch and Flower must be equal in the first two numbers.

    Raises:
        InvalidReply: They differ; the text says who has to upgrade.
    """
    for name, here in installed_versions().items():
        try:
            ours, theirs = Version(here), Version(versions[name])
        except InvalidVersion:
            raise InvalidReply(f"site {site}: {name} must be a version (got {versions[name]!r})") from None
        equal = ours == theirs if name == "keel" else ours.release[:2] == theirs.release[:2]
        if not equal:
            raise InvalidReply(upgrade_text(name, versions[name], f"site {site}"))


def upgrade_text(name: str, theirs: str, site: str) -> str:
    """Return which versions server and site have, and who has to upgrade."""
    here = installed_versions()[name]
    try:
        older = site if Version(theirs) < Version(here) else "the server"
    except InvalidVersion:  # a site can send any text
        older = site
    return f"the server has {SOFTWARE[name]} {here}, {site} has {theirs}; upgrade {older}"
