"""The engine `ray` on a local Ray that the tests of this module share. Ray chooses free ports.

How Keel connects to a cluster is tested in test_ray_cluster.py.
"""

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
from keel.config.defaults import make_spec
from keel.core.examples import Examples
from keel.core.loop import Loop
from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.data.store import prepared
from keel.engines import ray_cluster
from keel.engines.cohort import Cohort
from keel.engines.ray import Actor, Ray
from keel.engines.ray_actor import FileArray, PackedWorkload
from keel.engines.ray_cluster import Cluster, in_ray_worker
from keel.runs.build import make_task
from keel.runs.parallel import report_to
from keel.runs.ray_jobs import ray_executor
from tests.conftest import Called, make_loop, small_network, uneven_data, uneven_loop
from tests.contract.own import Lookahead
from tests.runs.test_task import Masked, two_inputs

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
ACTORS = 2
OBJECT_STORE = 10**8
"""Bytes of Ray's object store. Its default is a third of the machine's RAM."""
Command = Callable[..., Called]


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """A Ray that the tests of this module share. The engine leaves it open, because it did not start it."""
    os.environ.update(ray_cluster.SILENT)
    before = signal.getsignal(signal.SIGTERM)
    options = {"log_to_driver": False, "logging_level": "critical", "include_dashboard": False}
    ray.init("local", num_cpus=2 * ACTORS, num_gpus=1, object_store_memory=OBJECT_STORE, **options)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


class SharedActors:
    """Actors that engines use one after the other: to start an actor takes longer than a test."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def lend_to(self, training: Loop) -> Ray:
        """Have an engine use the actors, start those that are missing, and keep all that are left at its end."""
        engine = training.engine
        assert isinstance(engine, Ray)
        lent, self.handles = self.handles[: engine.count], self.handles[engine.count :]
        for handle in lent:
            engine.add_actor(handle)
        engine.start_actors()

        def keep() -> None:
            self.handles += [actor.handle for actor in engine.actors]
            engine.actors.clear()

        engine.remove_actors = keep  # type: ignore[method-assign]
        return engine


@pytest.fixture(scope="module")
def actors(shared_ray: None) -> SharedActors:
    return SharedActors()


Trained = tuple[TrainingState, list[Record]]


def trained(training: Loop) -> Trained:
    state, records = training.start(), []
    training.run(state, [lambda record, *_: records.append(record)])
    return state, records


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one[1] == other[1]
    assert one[0].server.keys() == other[0].server.keys()
    assert all(torch.equal(one[0].server[name], value) for name, value in other[0].server.items())
    assert one[0].clients.keys() == other[0].clients.keys()
    for client, state in one[0].clients.items():
        assert all(torch.equal(state[name], value) for name, value in other[0].clients[client].items())


def training_of(module: nn.Module, name: str, data: Any = None, **tables: Any) -> Loop:
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
    return make_loop(spec, make_task(spec, module=module, data=data or uneven_data()))


ON_RAY = ("fedavg", "scaffold", "mimemom", "fedhbm", "centralized", "diloco", "fedadamw", "fedper", "ditto")
"""One algorithm for each use of the protocol: client state, two phases, kept optimiser state, step state, a part of the
model in a message. The contract suite compares all algorithms over the local engines."""


@pytest.mark.parametrize("cls", [*(REGISTRY[name] for name in ON_RAY), Lookahead], ids=lambda cls: cls.name)
def test_bits_are_those_of_serial(cls: type[keel.Algorithm], actors: SharedActors) -> None:
    count = 1 if cls.name == "scaffold" else ACTORS
    table: dict[str, Any] = {"algorithm": cls(), "rounds": 3, "evaluation": {"every": 2}}
    training = uneven_loop({**table, "engine": {"name": "ray", "workers": count}})
    assert len(actors.lend_to(training).actors) == count
    assert training.engine.name == "ray"
    assert_same_bits(trained(training), trained(uneven_loop({**table, "engine": {"name": "serial"}})))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_statistics_of_batch_norm_travel(buffers: str, actors: SharedActors) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    tables: dict[str, Any] = {
        "model": {"name": "custom", "buffers": buffers},
        "local": {"batch": 4, "drop_last": True},
    }
    training = training_of(module, "ray", **tables)
    actors.lend_to(training)
    one, other = trained(training), trained(training_of(module, "serial", **tables))
    assert_same_bits(one, other)
    if buffers == "average":
        assert one[0].buffers is not None
        assert other[0].buffers is not None
        assert torch.equal(one[0].buffers, other[0].buffers)


def test_several_inputs_and_metrics_have_the_bits_of_serial(actors: SharedActors) -> None:
    torch.manual_seed(0)
    module, evaluation = Masked(), {"every": 1, "metrics": ["f1"], "clients": 3}
    training = training_of(module, "ray", two_inputs(), evaluation=evaluation)
    actors.lend_to(training)
    assert_same_bits(trained(training), trained(training_of(module, "serial", two_inputs(), evaluation=evaluation)))


def test_groups_of_clients_have_the_bits_of_cohort(actors: SharedActors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cohort, "group", 2)
    table: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "rounds": 3, "participation": {"rate": 1.0}}
    training = uneven_loop({**table, "engine": {"name": "cohort", "workers": ACTORS, "address": "local"}})
    actors.lend_to(training)
    assert training.engine.name == "cohort"
    assert_same_bits(trained(training), trained(uneven_loop({**table, "engine": {"name": "cohort", "workers": 1}})))


def test_a_run_that_no_node_has_room_for_ends_in_one_line(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.SCHEDULE_TIMEOUT", 0.5)
    training = training_of(small_network(), "ray")
    assert isinstance(training.engine, Ray)
    training.engine.cluster.gpus = 2.0  # as if the nodes that had them were lost
    with pytest.raises(OSError, match=r"^Ray: no node has had room for a worker for 0\.5 s$"):
        trained(training)


def test_ctrl_c_does_not_wait_for_a_round_that_no_node_computes(
    shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.engines.ray.POLL", 0.1)
    monkeypatch.setattr("keel.engines.ray.is_ending", lambda: True)
    training = training_of(small_network(), "ray")
    assert isinstance(training.engine, Ray)
    training.engine.cluster.gpus = 2.0
    with pytest.raises(KeyboardInterrupt):
        trained(training)


class Long(nn.Linear):
    """Takes longer to load than an actor may wait for a node."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if in_ray_worker():
            time.sleep(0.5)
        super().__setstate__(state)


def test_an_actor_on_a_node_may_load_for_long(actors: SharedActors, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Long(5, 3)
    training = training_of(module, "ray")
    ray.get([actor.scheduled for actor in actors.lend_to(training).actors])
    monkeypatch.setattr("keel.engines.ray.SCHEDULE_TIMEOUT", 0.1)
    monkeypatch.setattr("keel.engines.ray.POLL", 0.1)
    assert_same_bits(trained(training), trained(training_of(module, "serial")))


class Wrong(nn.Module):
    """Fails in training, but not in the trial before the first round, which has two examples."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(5, 3), kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 2:
            raise self.kind("this is wrong")
        return self.layer(inputs)


def test_an_error_in_an_actor_is_raised_with_its_traceback(actors: SharedActors) -> None:
    training = training_of(Wrong(ArithmeticError), "ray")
    actors.lend_to(training)
    with pytest.raises(RuntimeError, match=r"(?s)in a Ray actor:.*forward.*this is wrong"):
        trained(training)


def test_a_mistake_of_the_user_in_an_actor_is_one_line(actors: SharedActors) -> None:
    training = training_of(Wrong(KeelError), "ray")
    actors.lend_to(training)
    with pytest.raises(KeelError, match=r"^this is wrong$"):
        trained(training)


def test_another_version_on_a_node_is_refused(actors: SharedActors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray_actor.versions", lambda: {"torch": "1.0"})
    training = training_of(small_network(), "ray")
    actors.lend_to(training)
    with pytest.raises(
        KeelError, match=r"every node needs the same torch as the driver \(got '2.*, '1\.0' on the driver\)"
    ):
        trained(training)


def test_examples_are_in_memory_that_actors_share(shared_ray: None) -> None:
    engine = training_of(small_network(), "ray").engine
    assert isinstance(engine, Ray)
    packed = ray.get(ray.put(PackedWorkload.pack(engine.workload, by_file=True)))
    assert not any(array.flags.writeable for array in packed.examples)  # as all arrays in Ray's store
    assert not packed.workload.task.data.partition.indices.flags.writeable
    assert torch.equal(packed.unpack().task.data.train.inputs, engine.workload.task.data.train.inputs)


@pytest.mark.parametrize("reachable", [True, False])
def test_prepared_files_are_opened_on_nodes_that_reach_them(
    reachable: bool, actors: SharedActors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert all(isinstance(array, FileArray) for array in PackedWorkload.pack(engine.workload, by_file=True).examples)
    if not reachable:
        for file in tmp_path.rglob("*.npy"):
            file.unlink()
    actors.lend_to(training)
    by_file: list[bool] = []
    state = training.start()
    training.run(state, [lambda *_: by_file.extend(engine.packed)], lambda: bool(by_file))
    assert set(by_file) == ({True} if reachable else {True, False})
    expected = training_of(small_network(), "serial", rounds=1)
    assert torch.equal(state.server["theta"], trained(expected)[0].server["theta"])


def test_actors_share_a_gpu(shared_ray: None) -> None:
    assert Cluster().slots() == 2 * ACTORS
    assert Cluster(gpus=0.5).slots() == 2
    assert Cluster(gpus=0.1).slots() == 2 * ACTORS  # each needs a core too
    with pytest.raises(
        KeelError, match=r"engine\.gpus must not exceed the GPUs of a node \(got 2, the cluster has 1\)"
    ):
        Cluster(gpus=2.0).slots()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the actors can use the GPU of this machine")
def test_an_actor_with_a_gpu_trains_on_it(shared_ray: None) -> None:
    training = training_of(small_network(), "ray", engine={"name": "ray", "workers": 1, "gpus": 0.5})
    with pytest.raises(KeelError, match=r"engine\.device 'cuda'"):  # Ray counts a GPU that this machine lacks
        trained(training)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"name": "pool", "address": "auto"}, "address requires name = 'ray', 'cohort' or 'auto' .got 'pool'"),
        ({"name": "serial", "gpus": 0.5}, "gpus requires name = 'ray' or an address"),
        ({"name": "ray", "device": "cuda"}, "device on Ray must be 'cuda' with gpus, 'cpu' without"),
        ({"name": "ray", "gpus": 0.0}, "gpus"),
    ],
)
def test_engine_settings_that_conflict_are_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        make_spec({"engine": engine})


def test_a_run_has_the_same_identity_on_every_engine_with_its_bits() -> None:
    def identity(**engine: Any) -> dict[str, Any]:
        return make_spec({"engine": engine}).identity

    assert identity(name="serial") == identity(name="ray", address="auto", workers=3) == identity(name="pool")
    assert identity(name="cohort") == identity(name="cohort", address="auto")
    assert identity(name="cohort") != identity(name="ray")
    assert identity(name="ray") != identity(name="ray", gpus=0.5)


def test_actors_wait_when_too_many_bytes_of_results_wait(actors: SharedActors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.ray.WAITING_BYTES", 1)
    training = training_of(small_network(), "ray")
    actors.lend_to(training)
    assert_same_bits(trained(training), trained(training_of(small_network(), "serial")))


class Slow(nn.Module):
    """Takes long enough that an actor always has work that can be lost."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if in_ray_worker():
            torch.ones(400, 400).matrix_power(200)
        return self.layer(inputs)


def test_clients_of_a_killed_actor_are_trained_again(actors: SharedActors) -> None:
    training = training_of(Slow(), "ray", algorithm={"name": "scaffold"})
    engine = actors.lend_to(training)
    result, processes, killed, lost = engine.result, dict[Actor, int](), [], []

    def result_after_a_kill(reference: Any, actor: Actor) -> Any:
        if actor.loading is not None:
            processes[actor] = ray.get(actor.handle.__ray_call__.remote(lambda self: os.getpid()))
        elif actor.load and not killed:  # it trains the next client already
            killed.append(actor)
            os.kill(processes[actor], signal.SIGKILL)
        try:
            return result(reference, actor)
        except Exception:
            lost.append(reference)
            raise

    engine.result = result_after_a_kill  # type: ignore[method-assign]
    outcome = trained(training)
    assert killed
    assert lost
    assert engine.actors == []
    assert_same_bits(outcome, trained(training_of(Slow(), "serial", algorithm={"name": "scaffold"})))


def test_actors_that_are_lost_together_while_loading_are_replaced(
    actors: SharedActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.engines.dispatch.TRIES", 2)
    training = training_of(small_network(), "ray")
    for actor in actors.lend_to(training).actors:  # as many as there are tries
        ray.kill(actor.handle)
    assert_same_bits(trained(training), trained(training_of(small_network(), "serial")))


class Deadly(nn.Module):
    """Ends the process of an actor that trains it, but not the driver, which tries the model before the first round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if in_ray_worker():
            os._exit(1)
        return self.layer(inputs)


def test_a_client_that_kills_every_actor_ends_the_run_in_one_line(
    actors: SharedActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.engines.dispatch.TRIES", 2)
    training = training_of(Deadly(), "ray", engine={"name": "ray", "workers": 1})
    actors.lend_to(training)
    with pytest.raises(OSError, match=r"^the same clients were lost with their worker 2 times: .+$") as raised:
        trained(training)
    assert "\n" not in str(raised.value)


class Unloadable(nn.Linear):
    """Ends the process of an actor that loads it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if in_ray_worker():
            os._exit(1)
        super().__setstate__(state)


def test_actors_that_never_start_end_the_run_in_one_line(actors: SharedActors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.dispatch.TRIES", 2)
    training = training_of(Unloadable(5, 3), "ray", engine={"name": "ray", "workers": 1})
    actors.lend_to(training)
    with pytest.raises(OSError, match=r"^Ray: workers do not start; the last error: .+$"):
        trained(training)


def test_ctrl_c_saves_and_ends_ray_and_resume_gives_the_same_bits(
    shared_ray: None, keel: Command, tmp_path: Path
) -> None:
    # so many rounds that the run has not ended when the signal arrives, on a busy machine too
    run = ["run", "--engine", "ray", "--rounds", "40", "--set", "engine.workers=1"]
    lines = tmp_path / "ray" / "metrics.jsonl"
    # this starts a second Ray on the machine
    command = [sys.executable, "-m", "keel", *run, "--out", "ray"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        until = time.monotonic() + 90
        while time.monotonic() < until and not (lines.exists() and lines.read_text().count("\n") > 1):
            time.sleep(0.005)
        children = _descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert out.startswith("interrupted after ")
    for line in errors.splitlines():  # progress and how to resume, and nothing of Ray's
        assert line.startswith(("Footprint: up to", "Engine: ", "GHBM: ", "interrupted; continue with: keel resume")), (
            line
        )
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


def test_compare_runs_on_the_cluster_with_the_bits_of_serial(shared_ray: None, keel: Command, tmp_path: Path) -> None:
    common = ["compare", "--methods", "fedavg,fedhbm", "--seeds", "1", "--rounds", "2", "--json"]
    ran = keel(*common, "--engine", "ray", "--out", "cluster")
    assert ran.code == 0, ran.err
    assert [word for word in ("raylet", "pid=", "INFO", "WARNING", "Traceback") if word in ran.err] == []
    assert (local := keel(*common, "--engine", "serial", "--out", "local", "--quiet")).code == 0, local.err
    names = sorted(path.name for path in (tmp_path / "cluster").iterdir())
    assert names == ["digits-mlp-fedavg-seed0", "digits-mlp-fedhbm-seed0", "report.html"]
    for name in names[:2]:
        assert _bits(tmp_path / "cluster" / name) == _bits(tmp_path / "local" / name)
    again = keel(*common, "--engine", "serial", "--out", "cluster", "--quiet")  # finds the finished runs
    assert again.code == 0, again.err


def test_sweep_runs_on_the_cluster(shared_ray: None, keel: Command, tmp_path: Path) -> None:
    swept = keel(
        *("sweep", "--rounds", "3", "--over", "local.lr=0.1,0.5", "--engine", "ray", "--out", "swept", "--json"),
        *("--method", "optuna", "--points", "2"),
    )
    assert swept.code == 0, swept.err
    assert {row["status"] for row in json.loads(swept.out)["points"]} == {"finished"}


def test_a_folder_that_nodes_do_not_share_is_one_line(
    shared_ray: None, keel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.runs.ray_jobs.Path.touch", lambda self: None)  # as on a node with another disk
    called = keel("compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "2", "--engine", "ray", "--quiet")
    assert called.code == 2
    assert called.err.startswith("keel: --out must be a folder that every node reaches (")
    assert called.err.count("\n") == 1


def test_a_lost_progress_board_does_not_hide_the_first_error(shared_ray: None, tmp_path: Path) -> None:
    def fail() -> None:
        with ray_executor(Cluster(), tmp_path, report_to) as (executor, _):
            ray.kill(executor.board)
            raise KeelError("this went wrong")

    with pytest.raises(KeelError, match=r"^this went wrong$"):
        fail()


def _bits(path: Path) -> str:
    return json.loads((path / "summary.json").read_text())["model_sha256"]


def _descendants(pid: int) -> list[int]:
    """Return all processes that a process started, and that these started."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [descendant for child in children for descendant in _descendants(child)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
