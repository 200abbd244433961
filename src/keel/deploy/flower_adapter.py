"""The parts of Flower that its public modules do not export. No other module of Keel uses private parts of Flower.

Flower may change any of them in any release. `tests/deploy/test_flower_adapter.py` checks them one by one and names the
part that changed.
"""

import logging
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.supercore.error.base import FlowerError
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "CONNECTION_ERRORS",
    "InProcessGrid",
    "ReplyFilter",
    "log",
    "present_certificate",
    "run_supernode",
    "sample_nodes",
]

log = logging.getLogger("flwr")
"""Flower's logger: its output is what operators of a federation read."""

CONNECTION_ERRORS = (OSError, httpx.HTTPError, FlowerError)
"""What a grid raises when it cannot reach the SuperLink. Any other exception comes from the content of a reply."""

APP_EXCEPTION = 2
"""Flower's error code of a reply whose client app raised an exception."""

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
        config = dict(self.node_configs[node])
        context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        try:
            reply = self.app(message, context)
        except Exception as error:  # as a SuperNode does: any exception of the app becomes an error reply
            reply = Message(Error(APP_EXCEPTION, f"{type(error).__name__}: {error}"), reply_to=message)
        self.replies[message_id] = self.reply_filter(node, reply)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [self.replies.pop(message_id, None) for message_id in message_ids]
        return [reply for reply in replies if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def run_supernode(certificate: Path, key: Path, arguments: Sequence[str]) -> None:
    """Run `flower-supernode` with its arguments, and present a client certificate to the server's proxy.

    Flower has no option for a client certificate. Without one the proxy refuses the node.
    """
    from flwr.supernode.cli import flower_supernode

    present_certificate(certificate, key)
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def present_certificate(certificate: Path, key: Path) -> None:
    """Make every HTTPS connection that Flower opens in this process present a client certificate."""
    original = ProtobufClient.__init__

    def init(self: ProtobufClient, *args: Any, verify: ssl.SSLContext | bool | str = True, **kwargs: Any) -> None:
        if verify is not False:
            context = verify
            if not isinstance(context, ssl.SSLContext):
                context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
            context.load_cert_chain(certificate, key)
            verify = context
        original(self, *args, verify=verify, **kwargs)

    ProtobufClient.__init__ = init  # type: ignore[method-assign]
