"""How a site answers a request: under its policy and its limits, with an audit line, and without the text of errors."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from keel.deploy import messages
from keel.deploy.flower_adapter import error_reply, log, log_with_timestamps
from keel.deploy.invalid_reply import one_line
from keel.deploy.request_fields import request_record
from keel.deploy.site_audit import is_recorded, record, record_refusal
from keel.deploy.site_errors import RequestTimeout, reason_of
from keel.deploy.site_limits import memory_limit, time_limit
from keel.deploy.site_policy import APP, Policy, policy_of
from keel.deploy.state_folder import state_folder
from keel.deploy.versions import installed_versions
from keel.errors import KeelError
from keel.privacy.clipping import joint_norm

MAX_SPEC = 2**16
"""Characters of the settings that the audit log has at most: a server can send any text."""
Answer = Callable[[ConfigRecord, Message, Mapping[str, Any], Policy | None], RecordDict]
"""Called with the request's parameters, its message, the node's configuration and the policy."""


def answer_message(answer: Answer, message: Message, context: Context) -> Message:
    """Answer a message of the server. An error leaves the site as `CODE: ExceptionClass`; the log has its text."""
    node = context.node_config
    log_with_timestamps()
    try:
        policy = policy_of(node)
        with ExitStack() as limits:
            if policy is not None:
                limits.enter_context(time_limit(policy.timeout_seconds))
                limits.enter_context(memory_limit(policy.max_memory_mb))
            request = request_record(message.content)
            if len(str(request.get("spec", ""))) > MAX_SPEC:
                raise KeelError(f"the settings of a request must have at most {MAX_SPEC} characters")
            content = answer(request, message, node, policy)
        if policy is not None:
            policy.check_reply(messages.tensor_bytes(content))
        state = _state_folder(node)
        record(state, "answered", **_request(message, node), bytes=messages.tensor_bytes(content), norm=_norm(content))
    except (Exception, RequestTimeout) as error:
        reason = reason_of(error)
        log.exception("site %s refused or could not answer a request (%s)", node.get("site"), reason)
        record_refusal(_state_folder(node), **_request(message, node), reason=reason)
        return error_reply(reason, message)
    return Message(content, reply_to=message)


def _state_folder(node: Mapping[str, Any]) -> Path:
    return state_folder(node, f"site-{node.get('site')}")


def _request(message: Message, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the audit log says about a request."""
    request = message.content.config_records.get(messages.REQUEST, ConfigRecord())
    return {
        "kind": message.metadata.message_type,
        "server_node": str(message.metadata.src_node_id),
        "run": str(message.metadata.run_id),
        "training": one_line(request.get("training", "")),
        "round": one_line(request.get("round", "")),
        "app": str(node.get(APP, "")),
        **_settings(str(request.get("spec", "")), _state_folder(node)),
        "versions": installed_versions(),
    }


def _settings(spec: str, state: Path) -> dict[str, str]:
    """Return the hash of the settings of a request, and the settings themselves if the audit log lacks them."""
    digest = sha256(spec.encode()).hexdigest()
    return {"settings": digest} if is_recorded(state, digest) else {"settings": digest, "spec": spec[:MAX_SPEC]}


def _norm(content: RecordDict) -> float | None:
    """Return the norm of the report as it leaves; None if there is no report."""
    tensors = messages.unpack_request(content) if messages.TENSORS in content else {}
    return joint_norm(tensors) if tensors else None
