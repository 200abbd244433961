"""Ray as the command starts and joins it: nodes that are lost, Ctrl-C, runs in slots, what is said where it is not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.engines import cluster
from keel.engines.cluster import Cluster
from keel.engines.ray import Hand, Ray
from tests.conftest import Called
from tests.engines.test_ray import Slow, assert_same, ended, training_of

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with a core each, on this machine."""
    from ray.cluster_utils import Cluster as Nodes

    os.environ.update(cluster.SILENT)
    options = {"num_cpus": 1, "object_store_memory": 2**27}
    nodes = Nodes(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    nodes.second = nodes.add_node(**options)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_clients_of_a_lost_node_are_trained_again(nodes: Any) -> None:
    tables: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "rounds": 2}
    training = training_of(Slow(), "ray", **tables, engine={"name": "ray", "address": nodes.address})
    assert training.workers == 2
    engine = training.engine
    assert isinstance(engine, Ray)
    answer, places, lost = engine._answer, dict[Hand, str](), []
    gone: list[str] = []

    def answer_and_remove(ref: Any, hand: Hand) -> Any:
        if hand.starting is not None:
            places[hand] = ray.get(hand.actor.__ray_call__.remote(_node))
        elif len(places) == 2 and hand.orders and places[hand] == nodes.second.node_id and not gone:
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
    assert_same(ends, ended(training_of(Slow(), "serial", **tables)))


def _node(actor: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def test_ctrl_c_saves_and_ends_ray_and_resume_goes_on_to_the_same_bits(
    keel: Callable[..., Called], tmp_path: Path
) -> None:
    run = ["run", "--engine", "ray", "--rounds", "12", "--set", "engine.workers=2"]
    lines = tmp_path / "ray" / "metrics.jsonl"
    # a second Ray of the same machine does not get in its way
    command = [sys.executable, "-m", "keel", *run, "--out", "ray"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        until = time.monotonic() + 90
        while time.monotonic() < until and not (lines.exists() and lines.read_text().count("\n") > 1):
            time.sleep(0.005)
        children = _below(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert out.startswith("interrupted after ")
    for line in errors.splitlines():  # progress and the way to go on, and nothing of Ray's
        assert line.startswith(("Takes up to", "GHBM: ", "stopped; go on with: keel resume")), line
    assert len(children) > 2
    until = time.monotonic() + 30
    while any(map(_alive, children)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_alive, children))
    resumed = keel("resume", "ray", "--quiet")
    assert (resumed.code, resumed.err) == (0, "")
    assert keel(*run, "--set", "engine.name=serial", "--out", "serial", "--quiet").code == 0
    assert lines.read_text() == (tmp_path / "serial" / "metrics.jsonl").read_text()
    assert _bits(tmp_path / "ray") == _bits(tmp_path / "serial")


def test_a_comparison_has_a_run_in_each_slot(keel: Callable[..., Called], tmp_path: Path) -> None:
    common = ["compare", "--methods", "fedavg,fedhbm", "--seeds", "1", "--rounds", "4", "--json"]
    there = keel(*common, "--engine", "ray", "--out", "there")
    assert there.code == 0, there.err
    assert all(line.startswith(("FedAvg: ", "FedHBM: ")) for line in there.err.splitlines())
    here = keel(*common, "--engine", "serial", "--out", "here", "--quiet")
    drop = [{**row, "seconds_to_target": None} for row in json.loads(here.out)]
    assert [{**row, "seconds_to_target": None} for row in json.loads(there.out)] == drop
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert names == ["digits-mlp-fedavg-seed0", "digits-mlp-fedhbm-seed0", "report.html"]
    for name in names[:2]:
        assert _bits(tmp_path / "there" / name) == _bits(tmp_path / "here" / name)
    again = keel(*common, "--engine", "serial", "--out", "there", "--quiet")  # they are the same runs
    assert again.code == 0, again.err


def test_a_sweep_searches_on_the_cluster(keel: Callable[..., Called], tmp_path: Path) -> None:
    swept = keel(
        *("sweep", "--rounds", "3", "--over", "local.lr=0.1,0.5", "--engine", "ray", "--out", "swept", "--json"),
        *("--method", "optuna", "--points", "2"),
    )
    assert swept.code == 0, swept.err
    assert {row["status"] for row in json.loads(swept.out)["points"]} == {"finished"}


def test_a_mistake_in_a_slot_is_one_line(keel: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.runs.slots.Path.touch", lambda self: None)  # as on a node that has another disk
    called = keel("compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "2", "--engine", "ray", "--quiet")
    assert called.code == 2
    assert called.err.startswith("keel: --out: ")
    assert called.err.endswith("accepted: a folder that every node reaches\n")
    assert called.err.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere.invalid:6379", "auto"])
def test_an_address_where_there_is_no_ray_is_one_line(
    address: str, keel: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))  # or "auto" may find somebody's
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


def test_ray_is_ended_when_the_last_who_uses_it_leaves() -> None:
    one, other = Cluster(cores=1), Cluster(cores=1)
    assert one.slots() == other.slots() == 1
    one.leave()
    assert ray.is_initialized()
    other.leave()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _bits(path: Path) -> str:
    return json.loads((path / "summary.json").read_text())["model_sha256"]


def _below(pid: int) -> list[int]:
    """All processes that a process began, and those that these began."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [below for child in children for below in _below(child)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
