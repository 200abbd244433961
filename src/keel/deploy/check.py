"""A federation in one process: the same Flower apps, with messages that are handed over instead of sent."""

import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from keel.errors import KeelError
from keel.runs.folder import RunFolder
from keel.runs.spec import flatten
from keel.units import percent, size

Post = Callable[[int, Message], Message | None]


class OneProcess(Grid):
    """A Flower grid whose nodes are settings of one client app. `post` may lose or change what a node answers."""

    def __init__(self, app: ClientApp, nodes: Sequence[Mapping[str, Any]], post: Post = lambda node, reply: reply):
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


def check_app(folder: Path, rounds: int) -> str:
    """Runs the app in `folder` on made-up sites, and says what came of it."""
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        config, parts = flatten(table["config"]), table["components"]
        sites, rounds = config["federation.sites"], min(rounds, config.get("rounds", rounds))
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise KeelError(
            f"folder: {str(folder)!r} has no Flower app of Keel's ({error!r}); accepted: what keel deploy new writes"
        ) from None
    server, client = (
        _loaded(folder, parts[name], kind) for name, kind in (("serverapp", ServerApp), ("clientapp", ClientApp))
    )
    with TemporaryDirectory(prefix="keel-check-") as place:
        nodes = [{"site": n, "made-up": True, "memory": f"{place}/site-{n}"} for n in range(sites)]
        settings = {
            **config,
            "rounds": rounds,
            "federation.out": f"{place}/run",
            "federation.timeout": 1,
            "federation.wait": 1,
        }
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
        server(OneProcess(client, nodes), context)
        run = RunFolder.open(Path(place) / "run")
        summary = run.summary or {}
        aside = sum(len(record.get("set_aside", {})) for record in run.records())
        examples = [site["examples"] for site in run.environment["sites"]]
    if aside:
        raise KeelError(f"{folder}: {aside} answers of made-up sites were set aside (see above); accepted: none")
    sent = (summary["bytes_down"] + summary["bytes_up"]) / rounds / sites
    return (
        f"{summary['status']}: {rounds} rounds over {sites} made-up sites "
        f"with {', '.join(map(str, examples))} examples, "
        f"{summary['parameters']:,} parameters, accuracy {percent(summary['last_accuracy'])}, "
        f"{size(sent)} between the server and each site in a round"
    )


def _loaded(folder: Path, reference: str, kind: type) -> Any:
    """The app that "package.module:name" is, in that folder."""
    module, _, name = reference.partition(":")
    sys.path.insert(0, str(folder.absolute()))
    try:
        app = getattr(import_module(module), name)
    except Exception as error:  # it is the user's module: whatever it raises is theirs to mend
        raise KeelError(f"{reference}: cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    if not isinstance(app, kind):
        raise KeelError(f"{reference}: a {type(app).__name__}; accepted: a {kind.__name__}")
    return app
