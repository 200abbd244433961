"""The fields of a description that depend on the site's approval and key, for tests whose sites have neither."""

from hashlib import sha256
from typing import Any

from flwr.app import RecordDict

from keel.deploy import messages
from keel.deploy.site import Site
from keel.deploy.site_data import has_test_examples
from keel.deploy.versions import installed_versions

plain_describe = Site.describe


def describe(site: Site, content: RecordDict) -> RecordDict:
    """Describe the site as Keel does, and add the fields that are missing."""
    reply, data = plain_describe(site, content), site.task.data
    fields: dict[str, Any] = {
        "test_examples": len(data.test) if has_test_examples(data) else 0,
        "fingerprint": sha256(data.fingerprint().encode()).hexdigest(),
        "app": "",
        **installed_versions(),
    }
    record = reply.config_records[messages.REPLY]
    for name, value in fields.items():
        record.setdefault(name, value)
    return reply
