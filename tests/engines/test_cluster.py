"""A Ray that others have started: joined and left, with nodes that are lost; and what is said where there is none."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keel import KeelError
from keel.engines import cluster
from keel.engines.cluster import Cluster
from keel.engines.ray import Hand, Ray
from keel.rounds import Record
from keel.runs import slots
from keel.runs.slots import Board, Listener
from tests.conftest import Called, small_network
from tests.engines.test_ray import _bits, assert_same, ended, training_of

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with a core each, on this machine."""
    from ray.cluster_utils import Cluster as Nodes

    os.environ.update(cluster.SILENT)
    before = signal.getsignal(signal.SIGTERM)
    options = {"num_cpus": 1, "object_store_memory": 2**27}
    nodes = Nodes(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    nodes.second = nodes.add_node(**options)
    signal.signal(signal.SIGTERM, before)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_who_joins_last_leaves_last(nodes: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one, other = Cluster(nodes.address), Cluster(nodes.address)
    assert one.slots() == other.slots() == 2
    assert signal.getsignal(signal.SIGTERM) is before
    one.leave()
    assert ray.is_initialized()
    other.leave()
    assert not ray.is_initialized()


def test_what_goes_wrong_without_ray_does_not_connect_to_it() -> None:
    with pytest.raises(GeneratorExit), Cluster("127.0.0.1:9").telling():
        raise GeneratorExit
    assert not ray.is_initialized()


def test_who_can_make_no_engine_leaves(nodes: Any) -> None:
    with pytest.raises(KeelError, match=r"engine\.compile: is of the engine 'cohort', not of 'ray'"):
        training_of(small_network(), "ray", engine={"name": "ray", "address": nodes.address, "compile": True})
    assert not ray.is_initialized()


def test_clients_of_a_lost_node_are_trained_again(nodes: Any) -> None:
    tables: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "rounds": 2}
    training = training_of(small_network(), "ray", **tables, engine={"name": "ray", "address": nodes.address})
    assert training.workers == 2
    engine = training.engine
    assert isinstance(engine, Ray)
    answer, places, lost = engine._answer, dict[Hand, str](), []
    gone: list[str] = []

    def answer_and_remove(ref: Any, hand: Hand) -> Any:
        if hand.starting is not None:
            if not places:  # both are to work
                ray.wait([each.starting for each in engine.hands], num_returns=2)
            places[hand] = ray.get(hand.actor.__ray_call__.remote(_node))
            if places[hand] == nodes.second.node_id:
                hand.actor.__ray_call__.remote(_sleep)  # so that there is something to be lost
        elif not gone and any(places.get(each) == nodes.second.node_id and each.orders for each in engine.hands):
            gone.append(nodes.second.node_id)
            nodes.remove_node(nodes.second, allow_graceful=False)
        try:
            return answer(ref, hand)
        except Exception:
            lost.append(ref)
            raise

    engine._answer = answer_and_remove  # type: ignore[method-assign]
    ends = ended(training)
    assert set(places.values()) == {nodes.head_node.node_id, *gone}
    assert gone
    assert lost
    assert not ray.is_initialized()  # the engine joined, and left
    assert_same(ends, ended(training_of(small_network(), "serial", **tables)))


def test_a_run_of_a_lost_node_goes_on_elsewhere(
    nodes: Any, keel: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nodes.worker_nodes:
        nodes.add_node(num_cpus=1, object_store_memory=2**27)
    joined = Cluster(nodes.address)
    on_head = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes.head_node.node_id, soft=False)
    in_the_way = joined.ray.remote(num_cpus=1, scheduling_strategy=on_head)(Board).remote()
    ray.get(in_the_way.is_halted.remote())  # it has the only other core
    get, told = Listener.get, list[int]()

    class Held(Board):
        """Lets nobody past the second round before it is told to; local, so that Ray carries it to its process."""

        released = False

        async def tell(self, number: int, record: Record) -> bool:  # type: ignore[override]
            while record["round"] == 2 and not self.released:
                await asyncio.sleep(0.05)
            return super().tell(number, record)

        def release(self) -> None:
            self.released = True

    def get_and_remove(listener: Listener, *, timeout: float) -> Any:
        number, record = get(listener, timeout=timeout)
        if not told:
            for node in list(nodes.worker_nodes):
                nodes.remove_node(node, allow_graceful=False)
            ray.kill(in_the_way)
            ray.get(listener.board.release.remote())
        told.append(record["round"])
        return number, record

    monkeypatch.setattr(slots, "Board", Held)
    monkeypatch.setattr(Listener, "get", get_and_remove)
    common = ["compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "5", "--json", "--quiet"]
    ran = keel(*common, "--engine", "ray", "--address", nodes.address, "--out", "there")
    joined.leave()
    assert ran.code == 0, ran.err
    assert len(told) > len(set(told))  # what was not saved was done again
    assert (here := keel(*common, "--engine", "serial", "--out", "here")).code == 0, here.err
    name = "digits-mlp-fedavg-seed0"
    assert _bits(tmp_path / "there" / name) == _bits(tmp_path / "here" / name)


def _node(actor: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def _sleep(actor: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere.invalid:6379"])
def test_an_address_where_there_is_no_ray_is_one_line(
    address: str, keel: Callable[..., Called], tmp_path: Path
) -> None:
    called = keel("run", "--engine", "ray", "--address", address, "--out", "run", "--quiet")
    assert called.code == 2, called.err
    assert called.err.startswith(f"keel: engine.address: no Ray at '{address}' (")
    assert called.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_without_the_extra_the_message_says_which(
    keel: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (["run", "--engine", "ray"], ["compare", "--methods", "fedavg", "--address", "auto"]):
        called = keel(*command, "--out", "out", "--quiet")
        assert called.code == 2
        assert called.err == "keel: engine.name: 'ray' needs Ray; accepted: pip install 'keel-fl[ray]'\n"
        assert not (tmp_path / "out").exists()
