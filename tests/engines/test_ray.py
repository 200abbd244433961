"""The engine `ray` on a Ray that the tests share; how Ray is started and joined is in test_cluster.py."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import keel
from keel import KeelError
from keel.algorithms import REGISTRY
from keel.data.federated import Examples
from keel.data.store import prepared
from keel.engines import cluster
from keel.engines.cluster import Cluster, in_slot
from keel.engines.cohort import Cohort
from keel.engines.ray import Hand, Parcel, Ray, Stored
from keel.rounds import Position, Record, Training
from keel.runs.slots import slots
from keel.runs.spec import make_spec
from keel.task import make_task
from tests.conftest import Called, small_network, uneven_data, uneven_training
from tests.contract.own import Lookahead

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
ACTORS = 3
Command = Callable[..., Called]


@pytest.fixture(scope="module")
def there() -> Iterator[None]:
    """A Ray that the tests of this module share: the engine leaves one that it has not begun as it is."""
    os.environ.update(cluster.SILENT)
    before = signal.getsignal(signal.SIGTERM)
    options = {"log_to_driver": False, "logging_level": "critical", "include_dashboard": False}
    ray.init("local", num_cpus=2 * ACTORS, num_gpus=1, object_store_memory=2**27, **options)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


class Lent:
    """Actors that are lent from one engine to the next: to start one takes longer than a test."""

    def __init__(self) -> None:
        self.actors: list[Any] = []

    def to(self, training: Training) -> Ray:
        engine = training.engine
        assert isinstance(engine, Ray)
        engine.hands = [engine._hand(actor) for actor in self.actors[: engine.count]]
        engine._staff()
        self.actors += [hand.actor for hand in engine.hands[len(self.actors) :]]
        engine._dismiss = engine.hands.clear  # type: ignore[method-assign]
        return engine


@pytest.fixture(scope="module")
def lent(there: None) -> Lent:
    return Lent()


Ended = tuple[Position, list[Record]]


def ended(training: Training) -> Ended:
    position, records = training.start(), []
    training.run(position, [lambda record, *_: records.append(record)])
    return position, records


def assert_same(one: Ended, other: Ended) -> None:
    assert one[1] == other[1]
    assert one[0].server.keys() == other[0].server.keys()
    assert all(torch.equal(one[0].server[name], value) for name, value in other[0].server.items())
    assert one[0].memories.keys() == other[0].memories.keys()
    for client, memory in one[0].memories.items():
        assert all(torch.equal(memory[name], value) for name, value in other[0].memories[client].items())


def training_of(module: nn.Module, name: str, data: Any = None, **tables: Any) -> Training:
    spec = make_spec(
        {
            "rounds": 3,
            "local": {"batch": 4},
            "participation": {"rate": 1.0},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            "engine": {"name": name, "workers": None if name == "serial" else 2},
            **tables,
        }
    )
    return Training(spec, make_task(spec, module=module, data=data or uneven_data()))


@pytest.mark.parametrize("actors", [1, ACTORS])
@pytest.mark.parametrize("cls", [*REGISTRY.values(), Lookahead], ids=lambda cls: cls.name)
def test_bits_are_those_of_serial(cls: type[keel.Algorithm], actors: int, lent: Lent) -> None:
    table: dict[str, Any] = {"algorithm": cls(), "rounds": 4, "evaluation": {"every": 2}}
    training = uneven_training({**table, "engine": {"name": "ray", "workers": actors}})
    assert len(lent.to(training).hands) == actors
    assert training.engine.name == "ray"
    assert_same(ended(training), ended(uneven_training({**table, "engine": {"name": "serial"}})))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_statistics_of_batches_travel(buffers: str, lent: Lent) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    tables: dict[str, Any] = {
        "model": {"name": "custom", "buffers": buffers},
        "local": {"batch": 4, "drop_last": True},
    }
    training = training_of(module, "ray", **tables)
    lent.to(training)
    one, other = ended(training), ended(training_of(module, "serial", **tables))
    assert_same(one, other)
    if buffers == "average":
        assert one[0].buffers is not None
        assert other[0].buffers is not None
        assert torch.equal(one[0].buffers, other[0].buffers)


@pytest.mark.parametrize("actors", [1, ACTORS])
def test_groups_of_a_cohort_have_the_bits_of_cohort(actors: int, lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cohort, "group", 2)
    table: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "rounds": 3, "participation": {"rate": 1.0}}
    training = uneven_training({**table, "engine": {"name": "cohort", "workers": actors, "address": "local"}})
    lent.to(training)
    assert training.engine.name == "cohort"
    assert_same(ended(training), ended(uneven_training({**table, "engine": {"name": "cohort", "workers": 1}})))


class Slow(nn.Module):
    """Takes its time, so that there is always something to be lost."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if in_slot():
            torch.ones(400, 400).matrix_power(200)
        return self.layer(inputs)


def test_clients_of_a_killed_actor_are_trained_again(there: None) -> None:
    training = training_of(Slow(), "ray", algorithm={"name": "scaffold"})
    engine = training.engine
    assert isinstance(engine, Ray)
    answer, processes, killed, lost = engine._answer, dict[Hand, int](), [], []

    def answer_and_kill(ref: Any, hand: Hand) -> Any:
        if hand.starting is not None:
            processes[hand] = ray.get(hand.actor.__ray_call__.remote(lambda self: os.getpid()))
        elif hand.orders and not killed:  # it is at the next client already
            killed.append(hand)
            os.kill(processes[hand], signal.SIGKILL)
        try:
            return answer(ref, hand)
        except Exception:
            lost.append(ref)
            raise

    engine._answer = answer_and_kill  # type: ignore[method-assign]
    ends = ended(training)
    assert killed
    assert lost
    assert engine.hands == []
    assert_same(ends, ended(training_of(Slow(), "serial", algorithm={"name": "scaffold"})))


class Deadly(nn.Module):
    """Kills who trains it, but not in the trial before the first round, which is at home."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if in_slot():
            os._exit(1)
        return self.layer(inputs)


def test_a_client_that_kills_every_actor_ends_the_run_in_one_line(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.TRIES", 2)
    training = training_of(Deadly(), "ray", engine={"name": "ray", "workers": 1})
    with pytest.raises(OSError, match=r"Ray: what a worker was at was lost 2 times; the last time: .+") as raised:
        ended(training)
    assert "\n" not in str(raised.value)


def test_actors_that_are_lost_together_while_they_load_are_replaced(
    there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.engines.ray.TRIES", 2)
    training = training_of(small_network(), "ray")
    engine = training.engine
    assert isinstance(engine, Ray)
    engine._staff()
    for hand in engine.hands:  # as many as there are tries
        ray.kill(hand.actor)
    assert_same(ended(training), ended(training_of(small_network(), "serial")))


class Unloadable(nn.Linear):
    """Kills who receives it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if in_slot():
            os._exit(1)
        super().__setstate__(state)


def test_actors_that_never_start_end_the_run_in_one_line(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.TRIES", 2)
    training = training_of(Unloadable(5, 3), "ray", engine={"name": "ray", "workers": 1})
    with pytest.raises(OSError, match=r"^Ray: workers do not start; the last one: .+$"):
        ended(training)


def test_where_no_node_has_room_the_run_ends_in_one_line(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.ROOM_WITHIN", 0.5)
    training = training_of(small_network(), "ray")
    assert isinstance(training.engine, Ray)
    training.engine.cluster.gpus = 2.0  # the nodes that had them are gone
    with pytest.raises(OSError, match=r"^Ray: no node has had room for a worker for 0\.5 s$"):
        ended(training)


class Long(nn.Linear):
    """Takes longer to receive than a node has to take an actor."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if in_slot():
            time.sleep(1)
        super().__setstate__(state)


def test_an_actor_that_a_node_has_taken_may_load_for_long(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Long(5, 3)
    training = training_of(module, "ray")
    ray.get([hand.there for hand in lent.to(training).hands])
    monkeypatch.setattr("keel.engines.ray.ROOM_WITHIN", 0.1)
    monkeypatch.setattr("keel.engines.ray.LOOK", 0.1)
    assert_same(ended(training), ended(training_of(module, "serial")))


class Wrong(nn.Module):
    """Fails in training, but not in the trial before the first round, which has two examples."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(5, 3), kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 2:
            raise self.kind("this is wrong")
        return self.layer(inputs)


def test_an_error_in_an_actor_is_raised_with_where_it_was(lent: Lent) -> None:
    training = training_of(Wrong(ArithmeticError), "ray")
    lent.to(training)
    with pytest.raises(RuntimeError, match=r"(?s)in a Ray actor:.*forward.*this is wrong"):
        ended(training)


def test_a_mistake_that_an_actor_finds_is_one_line(lent: Lent) -> None:
    training = training_of(Wrong(KeelError), "ray")
    lent.to(training)
    with pytest.raises(KeelError, match=r"^this is wrong$"):
        ended(training)


def test_another_version_on_a_node_is_refused(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.versions", lambda: {"torch": "1.0"})
    training = training_of(small_network(), "ray")
    lent.to(training)
    with pytest.raises(KeelError, match=r"engine\.address: torch is '2.* and '1\.0' here; accepted: the same on every"):
        ended(training)


def test_examples_lie_in_memory_that_actors_share(there: None) -> None:
    engine = training_of(small_network(), "ray").engine
    assert isinstance(engine, Ray)
    parcel = ray.get(ray.put(Parcel.of(engine.problem, by_file=True)))
    assert not any(array.flags.writeable for array in parcel.examples)  # as what lies in Ray's store
    assert not parcel.problem.task.data.partition.indices.flags.writeable
    assert torch.equal(parcel.opened().task.data.train.inputs, engine.problem.task.data.train.inputs)


@pytest.mark.parametrize("reachable", [True, False])
def test_prepared_files_are_opened_where_they_are_reached(
    reachable: bool, lent: Lent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    data = uneven_data()

    def make(folder: Path) -> dict[str, Any]:
        np.save(folder / "inputs.npy", data.train.inputs.numpy())
        np.save(folder / "targets.npy", data.train.targets.numpy())
        return {}

    arrays = prepared("uneven", [], {}, make).arrays
    mapped = Examples(torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["targets"]))
    training = training_of(small_network(), "ray", keel.FederatedData("uneven", mapped, mapped, data.partition, 3))
    engine = training.engine
    assert isinstance(engine, Ray)
    assert all(isinstance(each, Stored) for each in Parcel.of(engine.problem, by_file=True).examples)
    if not reachable:
        for file in tmp_path.rglob("*.npy"):
            file.unlink()
    lent.to(training)
    put: list[bool] = []
    position = training.start()
    training.run(position, [lambda *_: put.extend(engine.parcels)], lambda: bool(put))
    assert set(put) == ({True} if reachable else {True, False})
    expected = training_of(small_network(), "serial", rounds=1)
    assert torch.equal(position.server["theta"], ended(expected)[0].server["theta"])


def test_fractions_of_gpus_are_shared_out(there: None) -> None:
    assert Cluster().slots() == 2 * ACTORS
    assert Cluster(gpus=0.5).slots() == 2
    assert Cluster(gpus=0.1).slots() == 2 * ACTORS  # each of which needs a core too
    with pytest.raises(KeelError, match=r"engine\.gpus: 2, but the cluster has 1; accepted: what a node has"):
        Cluster(gpus=2.0).slots()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that the actors can use")
def test_an_actor_that_was_given_a_gpu_uses_it(there: None) -> None:
    training = training_of(small_network(), "ray", engine={"name": "ray", "workers": 1, "gpus": 0.5})
    with pytest.raises(KeelError, match=r"engine\.device: 'cuda' is not there"):  # Ray was told of one that is not
        ended(training)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"name": "pool", "address": "auto"}, "address goes with name = 'ray', 'cohort' or 'auto', not 'pool'"),
        ({"name": "serial", "gpus": 0.5}, "gpus goes with name = 'ray' or an address"),
        ({"name": "ray", "device": "cuda"}, "accepted: 'cuda' with gpus, 'cpu' without"),
        ({"name": "ray", "gpus": 0.0}, "gpus"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(KeelError, match=said):
        make_spec({"engine": engine})


def test_where_a_run_is_computed_makes_no_other_run_of_it() -> None:
    def identity(**engine: Any) -> dict[str, Any]:
        return make_spec({"engine": engine}).identity

    assert identity(name="serial") == identity(name="ray", address="auto", workers=3) == identity(name="pool")
    assert identity(name="cohort") == identity(name="cohort", address="auto")
    assert identity(name="cohort") != identity(name="ray")
    assert identity(name="ray") != identity(name="ray", gpus=0.5)


def test_actors_may_wait_for_an_earlier_result(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.WAITING", 1)
    training = training_of(small_network(), "ray")
    lent.to(training)
    assert_same(ended(training), ended(training_of(small_network(), "serial")))


def test_ctrl_c_saves_and_ends_ray_and_resume_goes_on_to_the_same_bits(
    there: None, keel: Command, tmp_path: Path
) -> None:
    run = ["run", "--engine", "ray", "--rounds", "40", "--set", "engine.workers=1"]
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


def test_a_comparison_has_a_run_in_each_slot(there: None, keel: Command, tmp_path: Path) -> None:
    common = ["compare", "--methods", "fedavg,fedhbm", "--seeds", "1", "--rounds", "4", "--json"]
    ran = keel(*common, "--engine", "ray", "--out", "there")
    assert ran.code == 0, ran.err
    assert [word for word in ("raylet", "pid=", "INFO", "WARNING", "Traceback") if word in ran.err] == []
    assert (here := keel(*common, "--engine", "serial", "--out", "here", "--quiet")).code == 0, here.err
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert names == ["digits-mlp-fedavg-seed0", "digits-mlp-fedhbm-seed0", "report.html"]
    for name in names[:2]:
        assert _bits(tmp_path / "there" / name) == _bits(tmp_path / "here" / name)
    again = keel(*common, "--engine", "serial", "--out", "there", "--quiet")  # they are the same runs
    assert again.code == 0, again.err


def test_a_sweep_searches_on_the_cluster(there: None, keel: Command, tmp_path: Path) -> None:
    swept = keel(
        *("sweep", "--rounds", "3", "--over", "local.lr=0.1,0.5", "--engine", "ray", "--out", "swept", "--json"),
        *("--method", "optuna", "--points", "2"),
    )
    assert swept.code == 0, swept.err
    assert {row["status"] for row in json.loads(swept.out)["points"]} == {"finished"}


def test_a_mistake_in_a_slot_is_one_line(there: None, keel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.runs.slots.Path.touch", lambda self: None)  # as on a node that has another disk
    called = keel("compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "2", "--engine", "ray", "--quiet")
    assert called.code == 2
    assert called.err.startswith("keel: --out: ")
    assert called.err.endswith("accepted: a folder that every node reaches\n")
    assert called.err.count("\n") == 1


def test_a_lost_board_does_not_hide_what_went_wrong_first(there: None, tmp_path: Path) -> None:
    def fail() -> None:
        with slots(Cluster(), tmp_path) as (room, _):
            ray.kill(room.board)
            raise KeelError("this went wrong")

    with pytest.raises(KeelError, match=r"^this went wrong$"):
        fail()


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
