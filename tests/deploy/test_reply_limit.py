"""What a site may store at Flower's server: no more than the replies that the training asks it for."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from fastapi import HTTPException
from flwr.app import Message as FlowerMessage
from flwr.app import MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from keel.deploy import messages
from keel.deploy.flower_adapter import InProcessGrid, limit_pushes
from keel.deploy.reply_limit import FOLDER, ReplyQuota, announce_reply_size, announced_limits, reply_limit
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app
from tests.conftest import Called
from tests.deploy.in_process import CONFIG, network, server_test_examples, site_examples

RUN, NODE = 5, 7
PIECE = 5 << 20


class Store:
    """Flower's handlers, which here only count what would be stored."""

    def __init__(self, quota: ReplyQuota):
        self.bytes = 0
        self.handlers: dict[str, Any] = {
            "pull_messages": self.pull_messages,
            "push_messages": self.push_messages,
            "push_object": self.push_object,
        }
        limit_pushes(self.handlers, quota)

    def pull_messages(self, request: PullMessagesRequest, state: object) -> PullMessagesResponse:
        return PullMessagesResponse(messages_list=[Message(metadata=Metadata(run_id=RUN))])

    def push_messages(self, request: PushMessagesRequest, state: object) -> PushMessagesResponse:
        self.bytes += request.ByteSize()
        return PushMessagesResponse()

    def push_object(self, request: PushObjectRequest, state: object) -> PushObjectResponse:
        self.bytes += len(request.object_content)
        return PushObjectResponse(stored=True)

    def deliver(self) -> None:
        self.handlers["pull_messages"](request=PullMessagesRequest(node=Node(node_id=NODE)), state=None)

    def push(self, size: int, node: int = NODE) -> bool:
        content = PushObjectRequest(node=Node(node_id=node), run_id=RUN, object_content=bytes(size))
        return bool(self.handlers["push_object"](request=content, state=None).stored)


def test_200_mb_in_pieces_of_5_mib_are_refused_before_they_are_stored() -> None:
    limit = reply_limit(PIECE)
    store = Store(ReplyQuota(lambda run: limit))
    store.deliver()
    stored = [store.push(PIECE) for _ in range(40)]
    assert store.bytes <= 2 * limit
    assert (stored[0], stored[-1]) == (True, False)
    assert store.push(PIECE, node=NODE + 1)  # another node has its own quota


def test_each_message_that_a_node_receives_allows_one_reply_and_replies_do_not_add_up() -> None:
    store = Store(ReplyQuota(lambda run: 100))
    for _ in range(50):
        store.deliver()
        assert store.push(90)
    for _ in range(50):  # messages that the node leaves without an answer
        store.deliver()
    assert [store.push(100) for _ in range(3)] == [True, True, False]


def test_a_reply_with_a_large_text_is_refused() -> None:
    store = Store(ReplyQuota(lambda run: 1000))
    reply = Message(metadata=Metadata(run_id=RUN, src_node_id=NODE, reply_to_message_id="r", message_id="x" * 2000))
    request = PushMessagesRequest(node=Node(node_id=NODE), messages_list=[reply], message_object_trees=[ObjectTree()])
    with pytest.raises(HTTPException, match="413"):
        store.handlers["push_messages"](request=request, state=None)
    assert store.bytes == 0


@pytest.mark.parametrize("metadata", [{"src_node_id": 1}, {"src_node_id": NODE}, {"reply_to_message_id": "r"}])
def test_a_node_can_push_nothing_but_its_own_replies(metadata: dict[str, Any]) -> None:
    """Flower stores a message that replies to none as an instruction, to any node, in the name of the server."""
    store = Store(ReplyQuota(lambda run: 1000))
    message = Message(metadata=Metadata(run_id=RUN, **metadata))
    request = PushMessagesRequest(node=Node(node_id=NODE), messages_list=[message], message_object_trees=[ObjectTree()])
    with pytest.raises(HTTPException, match="403"):
        store.handlers["push_messages"](request=request, state=None)
    assert store.bytes == 0


def test_bytes_that_flower_does_not_store_are_given_back() -> None:
    quota = ReplyQuota(lambda run: 100)
    assert quota.take(RUN, NODE, 90)
    quota.give_back(RUN, NODE, 90)
    assert quota.take(RUN, NODE, 90)


def test_the_limit_of_a_run_is_what_its_server_app_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "limits"
    limit_of = announced_limits(folder, 10**9)
    announce_reply_size(RUN, 1000)  # without the variable nothing is written
    assert limit_of(RUN) == 10**9
    monkeypatch.setenv(FOLDER, str(folder))
    announce_reply_size(RUN, 1000)
    assert limit_of(RUN) == reply_limit(1000)
    assert limit_of(RUN + 1) == 10**9
    assert announced_limits(folder, 10)(RUN) == reply_limit(1000)  # a large model has large replies


@pytest.mark.parametrize(("algorithm", "vectors"), [("fedavg", 1), ("scaffold", 2), ("mimemom", 1)])
def test_the_server_announces_its_largest_reply_before_the_first_round(
    tmp_path: Path, algorithm: str, vectors: int
) -> None:
    announced: list[int] = []
    config = {**CONFIG, "rounds": 1, "algorithm.name": algorithm, "federation.out": str(tmp_path / "run")}
    spec, federation = read_settings(config)
    nodes = [{"site": n, "state-dir": str(tmp_path / f"site-{n}"), "device": "cpu"} for n in range(3)]
    grid = InProcessGrid(client_app(network, lambda node: site_examples(node["site"])), nodes)
    run_federation(grid, spec, federation, network, server_test_examples, announce=announced.append)
    model = 4 * sum(parameter.numel() for parameter in network().parameters())
    assert announced == [0, vectors * model]


def test_the_command_needs_the_folder_that_the_server_app_shares(
    keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    called = keel("deploy", "superlink", "--host", "127.0.0.1")
    assert called.code == 2
    assert "KEEL_SERVER_STATE must be a folder that the server app shares, as in start_server.sh" in called.err


@pytest.mark.parametrize("elements", [10, 1_500_000])  # the larger one is sent in several pieces
def test_an_honest_reply_is_within_its_limit(elements: int) -> None:
    tensors = {"delta": torch.rand(elements), "control": torch.rand(elements)}
    content = {messages.TENSORS: messages.pack(tensors), messages.REPLY: MetricRecord({"steps": 1, "loss": 0.1})}
    InProcessGrid(ClientApp(), [])  # sets what the constructor of a message needs
    objects = get_all_nested_objects(FlowerMessage(RecordDict(content), NODE, "train"))
    size = sum(len(each.deflate()) for each in objects.values())
    assert 8 * elements < size < reply_limit(8 * elements)


def test_the_processes_of_the_server_and_of_a_node_do_not_import_pytorch() -> None:
    modules = "keel.deploy.certified_nodes, keel.deploy.node, keel.deploy.reply_limit"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
