"""The parts of Flower that its public modules do not export. No other module of Keel uses private parts of Flower.

Flower may change any of them in any release. `tests/deploy/test_flower_adapter.py` checks them one by one and names the
part that changed.
"""

import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

import httpx
from click import ClickException
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args as flower_config
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.supercore.error.base import FlowerError
from flwr.supercore.logger import update_console_handler
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from keel.errors import KeelError

__all__ = [
    "CONNECTION_ERRORS",
    "InProcessGrid",
    "ReplyFilter",
    "build_bundle",
    "log",
    "log_with_timestamps",
    "parse_node_config",
    "present_certificate",
    "run_superlink",
    "run_supernode",
    "sample_nodes",
]

log = logging.getLogger("flwr")
"""Flower's logger: its output is what operators of a federation read."""


def log_with_timestamps() -> None:
    """Let Flower's logger print the time of each line."""
    update_console_handler(timestamps=True)


CONNECTION_ERRORS = (OSError, httpx.HTTPError, FlowerError)
"""What a grid raises when it cannot reach the SuperLink. Any other exception comes from the content of a reply."""

APP_EXCEPTION = 2
"""Flower's error code of a reply whose client app raised an exception."""

INVALID_BUNDLE = 7
"""Flower's error code of a reply to a message whose app bundle the node does not accept."""

AGENT_APP = "flwr-agentapp"
"""Flower's task type of a run that starts no client app but another program at the node."""

ReplyFilter = Callable[[int, Message], Message | None]
"""Called with a node's ID and its reply; returns the reply that the server gets, or None to drop it."""


class InProcessGrid(Grid):
    """A Flower grid that calls the client app in this process, once per message.

    Args:
        app: The client app that every node runs.
        node_configs: The node configuration (`--node-config`) of each node. Node IDs count from 1.
        reply_filter: Drops or changes replies, to test what the server does then.
    """

    def __init__(
        self,
        app: ClientApp,
        node_configs: Sequence[Mapping[str, Any]],
        reply_filter: ReplyFilter = lambda node, reply: reply,
    ):
        self.app, self.reply_filter = app, reply_filter
        self.node_configs = {node: dict(config) for node, config in enumerate(node_configs, start=1)}
        self.replies: dict[str, Message | None] = {}
        self.messages_sent = 0
        # The constructor of Message reads these and fails when they are not set.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Run) -> None:
        pass

    @property
    def run(self) -> Run:
        raise NotImplementedError("InProcessGrid has no Flower run")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("Flower has deprecated create_message; use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.node_configs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.messages_sent += 1
        message_id = str(self.messages_sent)
        message.metadata.__dict__["_message_id"] = message_id
        node = message.metadata.dst_node_id
        config = {"policy": "", **self.node_configs[node]}  # in one process nothing leaves a site
        context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        try:
            reply = self.app(message, context)
        except Exception as error:  # as a SuperNode does: any exception of the app becomes an error reply
            reply = error_reply(f"{type(error).__name__}: {error}", message)
        self.replies[message_id] = self.reply_filter(node, reply)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [self.replies.pop(message_id, None) for message_id in message_ids]
        return [reply for reply in replies if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def error_reply(reason: str, message: Message) -> Message:
    """Return a reply that says that the client app failed. Its text is `reason`, to which Flower adds nothing."""
    return Message(Error(APP_EXCEPTION, reason), reply_to=message)


class BundleCheck(Protocol):
    """How a node decides which app bundles it runs."""

    def check(self, bundle: bytes, message: Message) -> dict[str, Any]:
        """Return settings to add to the node's configuration. It is called before any code of the bundle is loaded.

        Raises:
            BundleRefused: The node does not run it.
        """
        ...

    def refused(self, reason: str, message: Message) -> None:
        """Record that a message was refused, whatever the reason."""
        ...


class BundleRefused(Exception):
    """The site does not run this app bundle. The text of the exception is the reason that the server gets."""


def run_supernode(arguments: Sequence[str], check: BundleCheck) -> None:
    """Run flower-supernode with these arguments, and check each message's app bundle before Flower installs it.

    A refused message gets an error reply, as after a failed verification by Flower itself.
    """
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    pull = start_client_internal._pull_and_store_message

    def checked_pull(**parts: Any) -> int | None:
        return _pull_checked(pull, start_client_internal._insert_message, check, parts)

    vars(start_client_internal)["_pull_and_store_message"] = checked_pull
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _pull_checked(
    pull: Callable[..., Any], insert: Callable[..., Any], check: BundleCheck, parts: dict[str, Any]
) -> Any:
    """Receive a message as Flower does, with checks of the run and of its app bundle on the way."""
    state, node_config = parts["state"], dict(parts["node_config"])
    received: list[Message] = []
    runs: list[Any] = []

    def receive() -> Any:
        answer = parts["receive"]()
        if answer is None:
            return None
        received.append(answer[0])
        run = state.get_run(answer[0].metadata.run_id)
        if run is not None:  # an approval may have been withdrawn since the first message of the run
            accept(run, state.get_fab(run.fab_hash))
        return answer

    def get_run(run_id: int) -> Any:
        runs.append(parts["get_run"](run_id))
        return runs[-1]

    def get_fab(fab_hash: str, run_id: int) -> Any:
        bundle = parts["get_fab"](fab_hash, run_id)
        accept(runs[-1], bundle)
        return bundle

    def accept(run: Any, bundle: Any) -> None:
        node_config.update(check.check(bundle.content, received[-1]))
        _check_origin(run, bundle)

    try:
        return pull(**{**parts, "receive": receive, "get_run": get_run, "get_fab": get_fab, "node_config": node_config})
    except BundleRefused as error:
        check.refused(str(error), received[-1])
        insert(Message(Error(INVALID_BUNDLE, str(error)), reply_to=received[-1]), state, parts["object_store"])
        return received[-1].metadata.run_id


def _check_origin(run: Any, bundle: Any) -> None:
    """Check that Flower will run this bundle: the server names the program, and the folder that the app is loaded from.

    Flower loads an app that is installed already without comparing its files. The folder is therefore removed.
    """
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.common.config import get_project_dir

    digest = sha256(bundle.content).hexdigest()
    stated = (run.fab_id, run.fab_version, run.fab_hash, bundle.hash_str)
    if run.primary_task_type == AGENT_APP or stated != (*get_fab_metadata(bundle.content), digest, digest):
        log.error("refused a run whose name, version or hash is not that of its app")
        raise BundleRefused("approval: WrongBundle")
    _remove(get_project_dir(*stated[:3]))


def _remove(folder: Path) -> None:
    """Remove an installed app, or refuse the bundle that would be loaded from its folder."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            rmtree(folder)
    except OSError as error:
        log.error("the installed app %s cannot be removed (%s)", folder, error)
        raise BundleRefused(f"approval: {type(error).__name__}") from None


class PushQuota(Protocol):
    """How many bytes the nodes may store at the SuperLink."""

    def deliver(self, run: int, node: int) -> None:
        """Called for each message of a run that a node has received."""
        ...

    def take(self, run: int, node: int, size: int) -> bool:
        """Return whether the node may store so many bytes more in this run."""
        ...

    def give_back(self, run: int, node: int, size: int) -> None:
        """Called for bytes that were taken and then not stored."""
        ...


class NodeCertificates(Protocol):
    """Which certificate each node may present."""

    def accepts(self, node: int, name: str) -> bool:
        """Return whether the node may come with the certificate of this name."""
        ...


SITE_HEADER = "x-keel-site"
"""Header in which the proxy passes on the name in a site's certificate. It replaces what the site itself sends."""


def run_superlink(arguments: Sequence[str], quota: PushQuota, certificates: NodeCertificates) -> None:
    """Run flower-superlink with these arguments.

    What a node pushes beyond the quota is refused before it is stored, and a node that comes with another certificate
    than its own is refused.
    """
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.routers.fleet import node_auth
    from flwr.superlink.servicer.fleet import fleet_handlers

    limit_pushes(vars(fleet_handlers), quota)
    bind_certificates(vars(node_auth), certificates)
    log_with_timestamps()
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def bind_certificates(node_auth: dict[str, Any], certificates: NodeCertificates) -> None:
    """Replace the authentication of a node by one that also checks the certificate that the proxy has verified."""
    from fastapi import HTTPException

    authenticate = node_auth["authenticate_node"]

    def authenticate_with_certificate(request: Any) -> None:
        authenticate(request)
        message, name = request.state.protobuf_request, request.headers.get(SITE_HEADER)
        if name is None or hasattr(message, "public_key"):  # not through the proxy; or the node has no ID yet
            return
        node = message.node.node_id if hasattr(message, "node") else message.node_id
        if not certificates.accepts(node, name):
            log.warning("refused a request of node %d: it came with the certificate of %s", node, name)
            raise HTTPException(403, "this node has another certificate")

    node_auth["authenticate_node"] = authenticate_with_certificate


def limit_pushes(handlers: dict[str, Any], quota: PushQuota) -> None:
    """Replace the handlers of a node's requests by those that keep the quota."""
    from fastapi import HTTPException
    from flwr.proto.message_pb2 import PushObjectResponse

    pull, push_messages, push_object = (handlers[name] for name in ("pull_messages", "push_messages", "push_object"))

    def counted_pull(request: Any, **parts: Any) -> Any:
        response = pull(request=request, **parts)
        for message in response.messages_list:
            quota.deliver(message.metadata.run_id, request.node.node_id)
        return response

    def accepts(run: int, node: int, size: int) -> bool:
        accepted = quota.take(run, node, size)
        if not accepted:
            log.warning("refused %d bytes of node %d: more than a reply of run %d can have", size, node, run)
        return accepted

    def limited_push_messages(request: Any, **parts: Any) -> Any:
        node = request.node.node_id
        sent = [message.metadata for message in request.messages_list]
        replies = [metadata.reply_to_message_id and metadata.src_node_id == node for metadata in sent]
        if not replies or not all(replies):
            log.warning("refused a message of node %d that is not a reply of its own", node)
            raise HTTPException(403, "a node may only reply")
        if not accepts(sent[0].run_id, request.node.node_id, request.ByteSize()):
            raise HTTPException(413, "the reply is too large")
        return push_messages(request=request, **parts)

    def limited_push_object(request: Any, **parts: Any) -> Any:
        if not accepts(request.run_id, request.node.node_id, len(request.object_content)):
            return PushObjectResponse(stored=False)
        response = push_object(request=request, **parts)
        if not response.stored:
            quota.give_back(request.run_id, request.node.node_id, len(request.object_content))
        return response

    handlers.update(pull_messages=counted_pull, push_messages=limited_push_messages, push_object=limited_push_object)


def build_bundle(folder: Path) -> bytes:
    """Build the app bundle of a folder as `flwr run` does."""
    from flwr.cli.build import build_fab_from_disk

    try:
        return build_fab_from_disk(folder)
    except (ValueError, OSError) as error:
        raise KeelError(f"folder {str(folder)!r} has no Flower app ({' '.join(str(error).split())})") from None


def node_config_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the node configuration in the arguments of flower-supernode."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    text = _parse_args_run_supernode().parse_args(list(arguments)).node_config
    return parse_node_config(text or "")


def parse_node_config(text: str) -> dict[str, Any]:
    """Return the node configuration in a text as 'site=0 data="/srv/patients.csv"'."""
    try:
        return dict(flower_config([text] if text else None))
    except ClickException:
        raise KeelError(
            f'node config: values must be numbers, true, false or texts in double quotes, as data="/srv/patients.csv" '
            f"(got {text!r})"
        ) from None


def present_certificate(certificate: Path, key: Path) -> None:
    """Make every HTTPS connection that Flower opens in this process present a client certificate.

    Flower waits for ever after a request that the proxy refuses, so such an answer ends the process.
    """
    original = ProtobufClient.__init__

    def init(self: ProtobufClient, *args: Any, verify: ssl.SSLContext | bool | str = True, **kwargs: Any) -> None:
        if verify is not False:
            context = verify
            if not isinstance(context, ssl.SSLContext):
                context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
            context.load_cert_chain(certificate, key)
            verify = context
        original(self, *args, verify=verify, **kwargs)
        self._client.event_hooks = {"response": [end_if_refused]}

    ProtobufClient.__init__ = init  # type: ignore[method-assign]


def end_if_refused(response: httpx.Response) -> None:
    """End this process if the answer is nginx's page for a certificate that it does not accept."""
    if response.status_code == httpx.codes.BAD_REQUEST and response.headers.get("content-type") == "text/html":
        log.error(
            "the proxy refuses this site's certificate (revoked or expired); ask the server for a new site-N.crt and "
            "start the node again"
        )
        os.kill(os.getpid(), signal.SIGTERM)
