"""What an engine answers for itself, by name and as an object; and engines that users bring."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel import KeelError, registry
from keel.core.engine import Engine, RoundSize, RoundWork, Workload
from keel.core.loop import Loop
from keel.engines import (
    ENGINES,
    RECORDED,
    bit_identical,
    cluster_engine,
    engine_kind,
    make_engine,
)
from keel.engines.ray import Ray
from keel.engines.ray_cluster import Cluster
from keel.engines.selection import FACTORIES
from keel.engines.serial import Serial
from tests.conftest import uneven_loop


def workload(**fields: Any) -> Workload:
    training = uneven_loop({"engine": {"name": "serial"}})
    return Workload(training.task, training.engine.local, **fields)  # type: ignore[attr-defined]


def processes(name: str, workers: int, cohort: int) -> int:
    return engine_kind(name).processes(workers, cohort)


def test_processes_by_name() -> None:
    assert [processes("serial", 8, 10), processes("pool", 8, 2), processes("pool", 2, 10)] == [1, 2, 2]
    assert [processes("cohort", 8, 32), processes("cohort", 8, 33), processes("cohort", 2, 1000)] == [1, 2, 2]
    assert processes("ray", 8, 100) == 8


def test_a_federation_computes_in_one_process_per_client() -> None:
    assert processes("flower", 8, 100) == 1
    assert not bit_identical("flower")


@pytest.mark.parametrize("answer", [bit_identical, cluster_engine, engine_kind])
def test_an_unknown_engine_is_an_error(answer: Any) -> None:
    with pytest.raises(KeelError, match=r"unknown engine\.name 'coohrt'; did you mean 'cohort'\?"):
        answer("coohrt")


def test_each_engine_can_be_built_by_its_name() -> None:
    assert set(FACTORIES) == set(RECORDED)


def test_bits_by_name() -> None:
    assert [name for name in ENGINES if bit_identical(name)] == ["serial", "pool", "ray"]
    assert not bit_identical("auto")  # it may become cohort


def test_the_engine_with_the_same_results_on_a_cluster() -> None:
    assert [cluster_engine(name) for name in ENGINES] == ["ray", "cohort", "ray", "ray"]
    with pytest.raises(KeelError, match=r"engine\.address is not supported for a run of the engine 'flower'"):
        cluster_engine("flower")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["serial", "pool", "cohort"])
def test_an_engine_and_its_name_answer_alike(name: str, workers: int) -> None:
    engine = make_engine(name, workload(), workers)
    assert engine.group == ENGINES[name].group
    assert engine.bit_identical == bit_identical(engine.name) == bit_identical(name)
    for cohort in (1, 10, 33, 1000):
        assert engine.processes(cohort) == processes(name, workers, cohort)


def test_the_engine_ray_answers_before_it_connects() -> None:
    cluster = Cluster("192.0.2.1:6379")
    engine = make_engine("ray", workload(), 4, cluster)
    assert isinstance(engine, Ray)
    assert (engine.name, engine.group, engine.bit_identical, engine.processes(3)) == ("ray", 1, True, 3)
    size = RoundSize(cohort=10, model=100, client_state=10, activations=1000)
    local = make_engine("ray", workload(), 4, Cluster("local"))
    assert local.footprint(size) - engine.footprint(size) == 4 * Serial(workload()).footprint(size)
    engine.close()  # which neither connects nor fails
    engine.close()


def test_compile_requires_cohort() -> None:
    with pytest.raises(KeelError, match=r"^engine\.compile requires engine\.name = 'cohort' \(got 'serial'\)$"):
        make_engine("serial", workload(compile=True), 1)


class UserEngine(Serial):
    """An engine of a user's: trains client by client, and counts the rounds."""

    rounds = 0

    def __init__(self, workload: Workload, workers: int):
        super().__init__(workload)
        self.workers = workers

    def train(self, work: RoundWork) -> Iterator[Any]:
        type(self).rounds += 1
        return super().train(work)


def incomplete(workload: Workload, workers: int) -> Any:
    return SimpleNamespace(train=None, probe=None)


def plain_function(workload: Workload, workers: int) -> Engine:
    return Serial(workload)


def trained(name: str) -> tuple[Loop, torch.Tensor]:
    training = uneven_loop({"rounds": 3, "engine": {"name": "serial"}})
    training.engine = make_engine(name, Workload(training.task, training.engine.local), 2)  # type: ignore[attr-defined]
    state = training.start()
    training.run(state, [])
    return training, state.server["theta"]


def test_a_spec_can_name_an_engine_of_a_user() -> None:
    name, UserEngine.rounds = f"{__name__}:UserEngine", 0
    training, theta = trained(name)
    assert UserEngine.rounds == 3
    assert training.engine.name == name  # by which the record refers to it
    assert torch.equal(theta, trained("serial")[1])
    assert bit_identical(name)  # as its class says
    assert processes(name, 8, 100) == 1


def test_a_factory_that_is_a_function_has_the_defaults() -> None:
    name = f"{__name__}:plain_function"
    assert trained(name)[0].engine.name == name
    assert not bit_identical(name)


def test_a_package_can_register_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="theirs", load=lambda: UserEngine)
    monkeypatch.setattr(registry, "_registered", lambda group: {"theirs": point} if group == "keel.engines" else {})
    assert trained("theirs")[0].engine.name == "theirs"
    with pytest.raises(KeelError, match="others"):
        engine_kind("others")


def test_a_factory_that_returns_no_engine_is_refused() -> None:
    expected = r"must return a keel\.core\.engine\.Engine \(got SimpleNamespace without bit_identical, close, evaluator"
    with pytest.raises(KeelError, match=expected):
        make_engine(f"{__name__}:incomplete", workload(), 1)
    with pytest.raises(KeelError, match=r"must be a function \(workload, workers\) -> Engine"):
        make_engine(f"{__name__}:ENGINES", workload(), 1)


def test_an_engine_of_a_user_does_not_run_on_a_cluster() -> None:
    with pytest.raises(KeelError, match=r"engine\.address requires engine\.name = 'ray', 'cohort' or 'auto'"):
        make_engine(f"{__name__}:UserEngine", workload(), 1, Cluster("192.0.2.1:6379"))
