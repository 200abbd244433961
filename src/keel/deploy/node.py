"""`keel deploy node`: the node of a site, which runs only the approved app, under the site's policy."""

import os
from pathlib import Path
from typing import Any

from flwr.app import Message

from keel.deploy.approval import REFUSED, Approval
from keel.deploy.flower_adapter import BundleRefused, log, log_with_timestamps, node_config_of, run_supernode
from keel.deploy.site_audit import record_refusal
from keel.deploy.site_policy import APP, POLICY, read_policy
from keel.deploy.state_folder import state_folder
from keel.errors import KeelError


def run_node(approved: Path, policy: Path, arguments: list[str]) -> None:
    """Run flower-supernode with these arguments. Files that it and its client app write are private to their owner."""
    read_policy(policy)  # an invalid one is an error before the node connects
    approval = Approval(approved.absolute())
    app = approval.hash()  # without an approval the node would refuse every request
    os.umask(0o077)
    log_with_timestamps()
    site = node_config_of(arguments).get("site")
    log.info("node of site %s: approved app %s, policy %s", site, app, policy.absolute())
    run_supernode(arguments, ApprovedOnly(approval, policy.absolute(), audit_folder(arguments)))


def audit_folder(arguments: list[str]) -> Path:
    """Return the folder of the site's client state, in which its client app writes the audit log too."""
    node_config = node_config_of(arguments)
    return state_folder(node_config, f"site-{node_config.get('site')}")


class ApprovedOnly:
    """Refuses every app but the approved one, before any of its code is loaded, and records each refusal.

    Args:
        state: The folder of the site's client state, which has its audit log, and gets the last refused app.
    """

    def __init__(self, approval: Approval, policy: Path, state: Path):
        self.approval, self.policy, self.state = approval, policy, state
        self.logged: set[int] = set()

    def check(self, bundle: bytes, message: Message) -> dict[str, Any]:
        try:
            app = self.approval.check(bundle, self.state / REFUSED)
        except Exception as error:  # whatever fails in the check, the app is not approved and the node stays
            log.error("%s", error, exc_info=not isinstance(error, KeelError))
            raise BundleRefused("approval: AppNotApproved") from None
        run = message.metadata.run_id
        if run not in self.logged:
            log.info("run %d: this site runs the approved app %s, not its own files", run, app)
            self.logged.add(run)
        return {APP: app, POLICY: str(self.policy)}

    def refused(self, reason: str, message: Message) -> None:
        metadata = message.metadata
        record_refusal(self.state, reason=reason, run=str(metadata.run_id), kind=metadata.message_type)
