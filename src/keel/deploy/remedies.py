"""What an operator can do about an error that a site has sent: it sends a code and the class of the exception alone."""

from keel.deploy.versions import VERSION, upgrade_text

REMEDIES = {
    "approval": "run keel deploy approve at the site on the app of this server",
    "data": "run keel deploy doctor at the site; its log has the text of the error",
    "model": "run keel deploy doctor at the site; its log has the text of the error",
    "state": "check the disk and the permissions of the site's state-dir; its log has the text of the error",
    "timeout": "raise timeout_seconds in the site's site.toml, or make its loader faster",
    "internal": "the site's log has the text of the error",
}
"""By the code of the error."""


def with_remedy(reason: str) -> str:
    """Return the reason for which a reply is not valid with what to do about it, where the code says so."""
    code, _, detail = reason.partition(":")
    if code == "policy":
        field = detail.partition(":")[0]
        return f"{reason}; change the settings of the run, or {field} in the site's site.toml"
    if code == VERSION:
        return upgrade_text("keel", detail.partition(":")[0], "this site")
    return f"{reason}; {REMEDIES[code]}" if code in REMEDIES else reason
