"""`keel deploy node`: the node of a site, which runs only the approved app, under the site's policy."""

import os
from pathlib import Path
from typing import Any

from flwr.app import Message

from keel.deploy.approval import Approval
from keel.deploy.flower_adapter import BundleRefused, CheckBundle, log, node_config_of, run_supernode
from keel.deploy.site_audit import record
from keel.deploy.site_policy import APP, POLICY, read_policy
from keel.deploy.site_state import state_folder
from keel.errors import KeelError


def run_node(approved: Path, policy: Path, arguments: list[str]) -> None:
    """Run flower-supernode with these arguments. Files that it and its client app write are private to their owner."""
    read_policy(policy)  # an invalid one is an error before the node connects
    os.umask(0o077)
    folder = state_folder(node_config_of(arguments), "node")
    run_supernode(arguments, bundle_check(Approval(approved.absolute()), policy.absolute(), folder))


def bundle_check(approval: Approval, policy: Path, state: Path) -> CheckBundle:
    """Return a check that refuses every app but the approved one, before any of its code is loaded."""
    logged: set[int] = set()

    def check(bundle: bytes, message: Message) -> dict[str, Any]:
        metadata = message.metadata
        try:
            app = approval.check(bundle)
        except Exception as error:  # whatever fails in the check, the app is not approved and the node stays
            log.error("%s", error, exc_info=not isinstance(error, KeelError))
            record(state, "refused", reason="approval", run=str(metadata.run_id), kind=metadata.message_type)
            raise BundleRefused("approval: AppNotApproved") from None
        if metadata.run_id not in logged:
            log.info("run %d: this site runs the approved app %s, not its own files", metadata.run_id, app)
            logged.add(metadata.run_id)
        return {APP: app, POLICY: str(policy)}

    return check
