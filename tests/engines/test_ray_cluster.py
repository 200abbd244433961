"""Connections to a Ray cluster of two nodes on this machine, and lost nodes. Ray chooses free ports."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keel import KeelError
from keel.core.records import Record
from keel.engines import Workload, make_engine, ray_cluster
from keel.engines.ray import Actor, Ray
from keel.engines.ray_cluster import Cluster
from keel.engines.ray_watch import LINE
from keel.runs import ray_jobs
from keel.runs.ray_jobs import ProgressBoard, ProgressReceiver
from tests.conftest import Called, small_network
from tests.engines.test_ray import OBJECT_STORE, _bits, assert_same_bits, trained, training_of

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with one core each."""
    from ray.cluster_utils import Cluster as Nodes

    os.environ.update(ray_cluster.SILENT)
    before = signal.getsignal(signal.SIGTERM)
    options = {"num_cpus": 1, "object_store_memory": OBJECT_STORE}
    nodes = Nodes(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    nodes.second = nodes.add_node(**options)
    signal.signal(signal.SIGTERM, before)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_the_last_to_leave_closes_the_connection(nodes: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one, other = Cluster(nodes.address), Cluster(nodes.address)
    assert one.slots() == other.slots() == 2
    assert signal.getsignal(signal.SIGTERM) is before
    one.leave()
    assert ray.is_initialized()
    one.leave()  # again, which does nothing
    assert ray.is_initialized()
    other.leave()
    assert not ray.is_initialized()
    other.leave()


LOCAL = """
import time
import psutil
from keel.engines.ray_cluster import Cluster

cluster = Cluster("local", cores=1)
assert cluster.slots() == 1
started = psutil.Process().children(recursive=True)
ports = [each for child in started for each in child.net_connections("tcp") if each.status == "LISTEN"]
print(len(ports), *{each.laddr.ip.removeprefix("::ffff:") for each in ports}, flush=True)
[raylet] = [child for child in started if child.name() == "raylet"]
raylet.kill()
for _ in range(600):
    cluster.ray.put(bytes(10**6))  # does not return
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def local_ray() -> subprocess.CompletedProcess[str]:
    """A program that starts Ray, prints its open ports, and loses the raylet.

    It is a process of its own: Ray keeps state in a process, which the other tests of clusters share.
    """
    pytest.importorskip("psutil", reason="psutil lists the open ports")
    return subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True, check=False)


def test_a_ray_that_is_started_here_listens_on_loopback_only(local_ray: Any) -> None:
    ports, *addresses = local_ray.stdout.splitlines()[0].split()
    assert int(ports) >= 3
    assert addresses == ["127.0.0.1"]


def test_a_lost_raylet_is_reported_in_one_line(local_ray: Any) -> None:
    assert local_ray.returncode == 1
    assert local_ray.stderr == LINE


def test_an_error_outside_of_ray_does_not_connect_to_it() -> None:
    with pytest.raises(GeneratorExit), Cluster("127.0.0.1:9").one_line_errors():
        raise GeneratorExit
    assert not ray.is_initialized()


def test_closing_an_engine_without_a_connection_does_not_connect() -> None:
    training = training_of(small_network(), "serial")
    workload = Workload(training.task, training.engine.local)  # type: ignore[attr-defined]
    engine = make_engine("ray", workload, 1, Cluster("127.0.0.1:9"))
    assert isinstance(engine, Ray)
    engine.close()  # before the first round
    engine.actors.append(Actor(handle=None, loading=None, scheduled=None, failed_starts=0))
    engine.close()  # after the connection was lost
    engine.close()
    assert engine.actors == []
    assert not ray.is_initialized()


def test_an_engine_that_cannot_be_built_leaves_the_cluster(nodes: Any) -> None:
    with pytest.raises(KeelError, match=r"engine\.compile requires engine\.name = 'cohort' \(got 'ray'\)"):
        training_of(small_network(), "ray", engine={"name": "ray", "address": nodes.address, "compile": True})
    assert not ray.is_initialized()


def test_clients_of_a_lost_node_are_trained_again(nodes: Any) -> None:
    tables: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "rounds": 2}
    training = training_of(small_network(), "ray", **tables, engine={"name": "ray", "address": nodes.address})
    assert training.engine.processes(6) == 2
    engine = training.engine
    assert isinstance(engine, Ray)
    result, node_of, removed, lost = engine.result, dict[Actor, str](), [], []

    def result_after_a_loss(reference: Any, actor: Actor) -> Any:
        if actor.loading is not None:
            if not node_of:  # both nodes are to have work
                ray.wait([actor.loading for actor in engine.actors], num_returns=2)
            node_of[actor] = ray.get(actor.handle.__ray_call__.remote(_node))
            if node_of[actor] == nodes.second.node_id:
                actor.handle.__ray_call__.remote(_sleep)  # so that its first item is still unfinished below
        elif not removed and any(node_of.get(actor) == nodes.second.node_id and actor.load for actor in engine.actors):
            removed.append(nodes.second.node_id)
            nodes.remove_node(nodes.second, allow_graceful=False)
        try:
            return result(reference, actor)
        except Exception:
            lost.append(reference)
            raise

    engine.result = result_after_a_loss  # type: ignore[method-assign]
    outcome = trained(training)
    assert set(node_of.values()) == {nodes.head_node.node_id, *removed}
    assert removed
    assert lost
    assert not ray.is_initialized()  # the engine connected, and left
    assert_same_bits(outcome, trained(training_of(small_network(), "serial", **tables)))


def test_a_run_on_a_lost_node_resumes_on_another(
    nodes: Any, keel: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nodes.worker_nodes:
        nodes.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
    cluster = Cluster(nodes.address)
    on_head = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes.head_node.node_id, soft=False)
    blocker = cluster.ray.remote(num_cpus=1, scheduling_strategy=on_head)(ProgressBoard).remote()
    ray.get(blocker.is_halted.remote())  # it takes the core of the head
    get, rounds = ProgressReceiver.get, list[int]()

    class PausingBoard(ProgressBoard):
        """Holds runs in round 2 until it is released. Local, so that Ray sends the class by value."""

        released = False

        async def add(self, number: int, record: Record) -> bool:  # type: ignore[override]
            while record["round"] == 2 and not self.released:
                await asyncio.sleep(0.05)
            return super().add(number, record)

        def release(self) -> None:
            self.released = True

    def get_and_remove(receiver: ProgressReceiver, *, timeout: float) -> Any:
        number, record = get(receiver, timeout=timeout)
        if not rounds:
            for node in list(nodes.worker_nodes):
                nodes.remove_node(node, allow_graceful=False)
            ray.kill(blocker)
            ray.get(receiver.board.release.remote())
        rounds.append(record["round"])
        return number, record

    monkeypatch.setattr(ray_jobs, "ProgressBoard", PausingBoard)
    monkeypatch.setattr(ProgressReceiver, "get", get_and_remove)
    common = ["compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "3", "--json", "--quiet"]
    ran = keel(*common, "--engine", "ray", "--address", nodes.address, "--out", "cluster")
    cluster.leave()
    assert ran.code == 0, ran.err
    assert len(rounds) > len(set(rounds))  # rounds after the last checkpoint ran again
    assert (local := keel(*common, "--engine", "serial", "--out", "local")).code == 0, local.err
    name = "digits-mlp-fedavg-seed0"
    assert _bits(tmp_path / "cluster" / name) == _bits(tmp_path / "local" / name)


def _node(actor: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def _sleep(actor: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere.invalid:6379", "\x1b[2J"])
def test_an_address_without_ray_is_one_line(address: str, keel: Callable[..., Called], tmp_path: Path) -> None:
    called = keel("run", "--engine", "ray", "--address", address, "--out", "run", "--quiet")
    assert called.code == 2, called.err
    assert called.err.startswith(f"keel: engine.address: no Ray at {address!r} (")
    assert called.err.count("\n") == 1
    assert called.err.strip().isprintable()
    assert not (tmp_path / "run").exists()


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(KeelError, match=r"no Ray at 'local' \(The current node timed out during startup\.\); use"):
        Cluster("local").slots()


def test_a_missing_ray_is_one_line_that_names_the_extra(
    keel: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (["run", "--engine", "ray"], ["compare", "--methods", "fedavg", "--address", "auto"]):
        called = keel(*command, "--out", "out", "--quiet")
        assert called.code == 2
        assert called.err == "keel: engine.name = 'ray' requires Ray; run: pip install 'keel-fl[ray]'\n"
        assert not (tmp_path / "out").exists()
