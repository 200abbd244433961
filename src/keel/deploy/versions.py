"""Versions that the machines of a federation exchange when a site joins, and which of them must be equal."""

from collections.abc import Mapping
from importlib.metadata import version

from packaging.version import InvalidVersion, Version

from keel.deploy.messages import InvalidReply

SOFTWARE = {"keel": "Keel", "torch": "torch", "flower": "Flower"}
"""Fields of a description with the name that people use."""
PACKAGES = {"keel": "keel-fl", "torch": "torch", "flower": "flwr"}


def installed_versions() -> dict[str, str]:
    """Return the versions on this machine."""
    return {name: version(package) for name, package in PACKAGES.items()}


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
            older = f"site {site}" if theirs < ours else "the server"
            raise InvalidReply(
                f"the server has {SOFTWARE[name]} {here}, site {site} has {versions[name]}; upgrade {older}"
            )
