"""A federation in one process: the same Flower apps, with messages that are handed over instead of sent."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Post = Callable[[int, Message], Message | None]


class OneProcess(Grid):
    """A Flower grid whose nodes are settings of one client app. `post` may lose or change what a node answers."""

    def __init__(self, app: ClientApp, nodes: list[Mapping[str, Any]], post: Post = lambda node, reply: reply):
        self.app, self.nodes, self.post = app, dict(enumerate(nodes, start=1)), post
        self.replies: dict[str, Message | None] = {}
        self.sent = 0
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Run) -> None:
        pass

    @property
    def run(self) -> Run:
        raise NotImplementedError("there is no run in one process")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("Flower wants messages made by their class")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.sent += 1
        number = message.metadata.__dict__["_message_id"] = str(self.sent)
        node = message.metadata.dst_node_id
        settings = dict(self.nodes[node])
        context = Context(run_id=1, node_id=node, node_config=settings, state=RecordDict(), run_config={})
        try:
            reply = self.app(message, context)
        except Exception as error:  # as Flower does: whatever the app raises is an answer that says so
            reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        self.replies[number] = self.post(node, reply)
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = [self.replies.pop(number, None) for number in message_ids]
        return [reply for reply in there if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
