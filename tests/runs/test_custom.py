"""What a user brings: objects passed to keel.run, "module:name" in a spec, entry points of installed packages."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import keel
from keel import registry
from keel.algorithms import make_algorithm
from keel.core.engine import Workload
from keel.engines.serial import Serial
from keel.runs.folder import RunFolder
from tests.conftest import small_network, uneven_data

SHORT = {"rounds": 2, "evaluation": {"every": 1, "last": 1}}


@dataclass(frozen=True)
class FirstClients:
    """Samples the first clients in every round."""

    clients: int
    size: int

    @property
    def period(self) -> float:
        return self.clients / self.size

    def cohort(self, round: int) -> np.ndarray:
        return np.arange(self.size)


def first_clients(sizes: np.ndarray, size: int, seed: int) -> FirstClients:
    return FirstClients(len(sizes), size)


class Closing(Serial):
    """An engine that counts how often it is closed."""

    def __init__(self, workload: Workload, workers: int):
        super().__init__(workload)
        self.closed = 0
        engines.append(self)

    def close(self) -> None:
        self.closed += 1
        super().close()


engines: list[Closing] = []


@pytest.fixture(autouse=True)
def _no_engines() -> None:
    engines.clear()


def passed(*names: str) -> dict[str, Any]:
    """The objects of these names, as arguments of keel.run."""
    objects = {
        "data": uneven_data(),
        "model": small_network(),
        "algorithm": make_algorithm("fedavg"),
        "sampler": FirstClients(6, 3),
        "engine": Closing,
    }
    return {name: objects[name] for name in names}


@pytest.mark.parametrize(
    ("table", "argument", "message"),
    [
        ({"data": {"name": "digits"}}, "data", "data.name = 'digits' conflicts with data="),
        ({"data": {"alpha": 0.5}}, "data", "data.alpha = 0.5 conflicts with data="),
        ({"data": {"clients": 7, "name": "custom"}}, "data", "data.clients = 7 conflicts with data="),
        ({"model": {"name": "mlp"}}, "model", "model.name = 'mlp' conflicts with model="),
        ({"model": {"hidden": [8], "buffers": "average"}}, "model", "model.hidden = [8] conflicts with model="),
        ({"algorithm": {"name": "ghbm"}}, "algorithm", "algorithm.name = 'ghbm' conflicts with algorithm="),
        ({"algorithm": {"beta": 0.5}}, "algorithm", "algorithm.beta = 0.5 conflicts with algorithm="),
        ({"algorithm": make_algorithm("ghbm")}, "algorithm", "algorithm 'ghbm' of the spec conflicts with algorithm="),
        ({"participation": {"sampler": "cyclic"}}, "sampler", "sampler = 'cyclic' conflicts with sampler="),
        ({"engine": {"name": "pool"}}, "engine", "engine.name = 'pool' conflicts with engine="),
    ],
    ids=str,
)
def test_a_table_that_conflicts_with_an_argument_is_refused(
    table: dict[str, Any], argument: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(keel.KeelError) as caught:
        keel.run({**SHORT, **table}, out=tmp_path / "run", **passed(argument))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("table", "argument"),
    [
        ({"data": {"clients": 50}}, "data"),
        ({"model": {"name": "linear"}}, "model"),
        ({"algorithm": {"name": "fedhbm"}}, "algorithm"),
        ({"participation": {"sampler": "cyclic"}}, "sampler"),
        ({"engine": {"name": "pool"}}, "engine"),
    ],
    ids=str,
)
def test_a_spec_object_or_file_that_conflicts_with_an_argument_is_refused(
    table: dict[str, Any], argument: str, tmp_path: Path
) -> None:
    spec = keel.make_spec({**SHORT, **table})
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    for source in (spec, tmp_path / "spec.toml"):
        with pytest.raises(keel.KeelError, match=f"conflicts with {argument}="):
            keel.run(source, out=tmp_path / "run", **passed(argument))
    assert not (tmp_path / "run").exists()


def test_the_defaults_of_a_spec_object_do_not_conflict(tmp_path: Path) -> None:
    objects = passed("data", "model", "algorithm", "sampler", "engine")
    run = keel.run(keel.make_spec(SHORT), out=tmp_path / "run", **objects)
    assert [record["cohort"] for record in run.records] == [[1, 2, 0]] * 2  # ordered by number of examples
    assert run.summary["parameters"] == 5 * 4 + 4 + 4 * 3 + 3


def test_a_model_may_replace_the_default_model_of_the_specs_data(tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"{name}.npy") for name in ("inputs", "labels", "test_inputs", "test_labels")}
    for name, file in files.items():
        np.save(file, np.arange(40) % 3 if "labels" in name else np.random.default_rng(0).normal(size=(40, 5)))
    spec = keel.make_spec({**SHORT, "data": {"name": "arrays", **files, "clients": 4}})
    assert keel.run(spec, out=tmp_path / "run", **passed("model")).status == "finished"


def test_the_buffer_policy_may_be_set_for_a_model_that_is_passed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    table = {**SHORT, "model": {"buffers": "group_norm"}}
    for name, spec in ("table", table), ("spec", keel.make_spec(table)):
        run = keel.run(spec, model=model, data=uneven_data(), out=tmp_path / name)  # type: ignore[arg-type]
        assert isinstance(run.module[1], nn.GroupNorm)


def test_a_spec_object_may_have_an_algorithm_that_cannot_be_imported(tmp_path: Path) -> None:
    @keel.hyperparameters
    class Local(keel.Algorithm):
        name, title, paper = "local", "Local", "none"

    spec = keel.make_spec({**SHORT, "algorithm": Local()})
    assert keel.run(spec, out=tmp_path / "run", **passed("data", "model")).status == "finished"


def test_a_sampler_passed_in_python_must_be_passed_to_resume(tmp_path: Path) -> None:
    objects = passed("data", "model", "sampler")
    whole = keel.run(SHORT, out=tmp_path / "whole", **objects)
    stopped = keel.run(SHORT, out=tmp_path / "stopped", stop=lambda: True, **objects)
    assert [sorted(record["cohort"]) for record in whole.records] == [[0, 1, 2]] * 2
    with pytest.raises(keel.KeelError, match=r"pass sampler again, with keel\.resume\(.*, sampler="):
        keel.resume(stopped.path, **passed("data", "model"))
    assert keel.resume(stopped.path, **objects).records == whole.records


def test_an_engine_passed_in_python_must_be_passed_to_resume(tmp_path: Path) -> None:
    objects = passed("data", "model", "engine")
    whole = keel.run({**SHORT, "engine": {"name": "serial"}}, out=tmp_path / "whole", **passed("data", "model"))
    stopped = keel.run(SHORT, out=tmp_path / "stopped", stop=lambda: True, **objects)
    with pytest.raises(keel.KeelError, match=r"pass engine again, with keel\.resume\(.*, engine="):
        keel.resume(stopped.path, **passed("data", "model"))
    resumed = keel.resume(stopped.path, **objects)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert [engine.closed > 0 for engine in engines] == [True, True]


def test_the_engine_is_closed_if_the_run_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise keel.KeelError("too large")

    monkeypatch.setattr("keel.runs.run.check_footprint", refuse)
    with pytest.raises(keel.KeelError, match="too large"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model", "engine"))
    assert [engine.closed for engine in engines] == [1]


def test_the_engine_is_closed_if_the_folder_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(keel.KeelError, match="exists"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model", "engine"))
    assert [engine.closed for engine in engines] == [1]


def test_the_engine_is_closed_when_an_ended_run_is_resumed(tmp_path: Path) -> None:
    keel.run(SHORT, out=tmp_path / "run", **passed("data", "model", "engine"))
    engines.clear()
    assert keel.resume(tmp_path / "run", **passed("data", "model", "engine")).status == "finished"
    assert [engine.closed for engine in engines] == [1]


def test_the_engine_is_closed_if_a_run_is_resumed_with_another_model(tmp_path: Path) -> None:
    keel.run(SHORT, out=tmp_path / "run", **passed("data", "model", "engine"))
    engines.clear()
    with pytest.raises(keel.KeelError, match="other initial weights"):
        keel.resume(tmp_path / "run", **passed("data", "engine"), model=small_network(seed=1))
    assert [engine.closed for engine in engines] == [1]


FIRST = f"{__name__}:first_clients"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that registers a sampler, an algorithm, and a sampler that cannot be imported."""
    points = [
        EntryPoint("first", FIRST, "keel.samplers"),
        EntryPoint("broken", "no_such_module:sampler", "keel.samplers"),
        EntryPoint("lookahead", "tests.contract.own:Lookahead", "keel.algorithms"),
    ]
    monkeypatch.setattr(registry, "_registered", lambda group: {p.name: p for p in points if p.group == group})


@pytest.mark.parametrize("sampler", [FIRST, "first"], ids=["module:name", "entry point"])
def test_a_sampler_may_be_named_in_the_spec(sampler: str, tmp_path: Path, registered: None) -> None:
    table = {**SHORT, "participation": {"sampler": sampler, "rate": 0.5}}
    stopped = keel.run(table, out=tmp_path / "run", stop=lambda: True, **passed("data", "model"))
    run = keel.resume(stopped.path, **passed("data", "model"))
    assert [sorted(record["cohort"]) for record in run.records] == [[0, 1, 2]] * 2
    assert f'sampler = "{sampler}"' in (run.path / "spec.toml").read_text()


def test_an_algorithm_may_be_an_entry_point(registered: None) -> None:
    assert keel.make_spec({"algorithm": {"name": "lookahead", "lean": 0.2}}).algorithm.settings() == {"lean": 0.2}


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("broken", "participation.sampler: cannot import 'broken' (ModuleNotFoundError"),
        ("tests.runs.no_such_module:x", "participation.sampler: cannot import 'tests.runs.no_such_module:x'"),
        (f"{__name__}:nothing", "(AttributeError: module"),
        ("firts", "unknown participation.sampler 'firts'; did you mean 'first'?"),
    ],
)
def test_a_sampler_that_cannot_be_imported_gives_one_line(sampler: str, message: str, registered: None) -> None:
    with pytest.raises(keel.KeelError) as caught:
        keel.make_spec({"participation": {"sampler": sampler}})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def resumable(tmp_path: Path, **objects: Any) -> Path:
    """A run that was interrupted after its first round."""
    path = tmp_path / "run"
    keel.run({"rounds": 4, "evaluation": {"every": 1, "last": 1}}, out=path, stop=lambda: True, **objects)
    return path


def test_resume_refuses_another_algorithm(tmp_path: Path) -> None:
    objects = passed("data", "model")
    path = resumable(tmp_path, **objects, algorithm=make_algorithm("fedprox", mu=1.0))
    with pytest.raises(keel.KeelError, match=r"algorithm must be .*fedprox"):
        keel.resume(path, **objects, algorithm=make_algorithm("fedprox", mu=2.0))
    with pytest.raises(keel.KeelError, match=r"algorithm must be .*fedprox"):
        keel.resume(path, **objects, algorithm=make_algorithm("fedavg"))
    assert keel.resume(path, **objects, algorithm=make_algorithm("fedprox", mu=1.0)).status == "finished"


@pytest.mark.parametrize("name", ["sampler", "engine"])
def test_resume_refuses_an_object_that_the_run_did_not_start_with(name: str, tmp_path: Path) -> None:
    path = resumable(tmp_path, **passed("data", "model"))
    with pytest.raises(keel.KeelError, match=f"{name} was not passed when this run started"):
        keel.resume(path, **passed("data", "model", name))


def test_resume_refuses_another_sampler(tmp_path: Path) -> None:
    path = resumable(tmp_path, **passed("data", "model"), sampler=FirstClients(6, 2))
    with pytest.raises(keel.KeelError, match=r"sampler differs .*: FirstClients, 2 of 6 .* then, .* 3 of 6 .* now"):
        keel.resume(path, **passed("data", "model"), sampler=FirstClients(6, 3))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("engine", {"engine": {"compile": True}}),
        ("engine", {"engine": {"address": "127.0.0.1:9"}}),
        ("sampler", {"participation": {"rate": 0.5}}),
    ],
)
def test_fields_that_an_object_makes_meaningless_are_refused(name: str, table: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match=f"conflicts with {name}=, which replaces it"):
        keel.run({**SHORT, **table}, out=tmp_path / "run", **passed("data", "model", name))
    assert not (tmp_path / "run").exists()


def test_the_rate_of_a_passed_sampler_is_recorded(tmp_path: Path) -> None:
    run = keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), sampler=FirstClients(6, 2))
    assert RunFolder.open(run.path).spec.participation.rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("table", [{"data": "digits"}, {"participation": 0.5}])
def test_a_table_that_is_none_gives_one_line(table: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match="must be a table"):
        keel.run(table, out=tmp_path / "run", **passed("data", "model", "sampler"))


@pytest.mark.parametrize("cohort", [[0, 0, 1], [0, -2], [0, 99], [], [0.5]])
def test_a_sampler_with_an_invalid_cohort_gives_one_line(cohort: list[Any], tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Invalid(FirstClients):
        def cohort(self, round: int) -> np.ndarray:
            return np.array(cohort)

    with pytest.raises(keel.KeelError, match=r"sampler.cohort\(1\) must be distinct numbers from 0 to 5"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), sampler=Invalid(6, 2))


def test_a_sampler_of_another_number_of_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match=r"sampler.clients must be the number of clients of the data, 6 \(got 4\)"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), sampler=FirstClients(4, 2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["serial", lambda workload, workers: object(), lambda workload, workers: 1 / 0])
def test_an_engine_that_is_none_gives_one_line(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match="engine"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), engine=engine)
    assert not (tmp_path / "run").exists()


def test_a_hook_that_cannot_be_called_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match="hooks must hold functions"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), hooks=[3])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_and_torch_reach_the_records(tmp_path: Path) -> None:
    def add(record: Any, state: Any, seconds: float) -> None:
        record["number"], record["scalar"], record["nan"] = np.float32(0.5), torch.tensor(3), float("nan")

    run = keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), hooks=[add])
    assert [(r["number"], r["scalar"], r["nan"]) for r in run.records] == [(0.5, 3, None)] * 2  # type: ignore[typeddict-item]


def test_a_value_that_is_not_json_names_its_key(tmp_path: Path) -> None:
    def add(record: Any, state: Any, seconds: float) -> None:
        record["thing"] = object()

    with pytest.raises(keel.KeelError, match=r"record\['thing'\] must be a number"):
        keel.run(SHORT, out=tmp_path / "run", **passed("data", "model"), hooks=[add])
