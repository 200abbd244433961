"""keel.compare: objects reach the runs, runs are reused and resumed, mistakes are one line."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import keel
from keel.algorithms.fedavg import FedAvg
from keel.algorithms.ghbm import GHBM
from keel.runs.folder import RunFolder
from tests.api.own import SPEC, own_algorithm, own_data, own_loss, own_model
from tests.conftest import Called, one_line_error

OBJECTS: dict[str, Any] = {"spec": SPEC, "data": own_data(), "model": own_model(), "loss": own_loss(), "seeds": 1}


def shas(comparison: keel.Comparison) -> dict[str, str]:
    """The SHA-256 of the model of each run."""
    return {path.name: json.loads((path / "summary.json").read_text())["model_sha256"] for path in comparison.paths}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> keel.Comparison:
    """Named, built-in and local algorithms with a local model and loss, over two seeds."""
    methods = {"average": "fedavg", "short": GHBM(tau=1), "long": GHBM(tau=2), "own": own_algorithm(scale=0.5)}
    return keel.compare(
        methods,
        **{**OBJECTS, "seeds": [3, 5]},
        baseline="short",
        out=tmp_path_factory.mktemp("compare"),
        progress=False,
    )


def test_every_run_is_the_one_that_keel_run_makes(compared: keel.Comparison, tmp_path: Path) -> None:
    objects = {name: OBJECTS[name] for name in ("data", "model", "loss")}
    for name, algorithm in ("long", GHBM(tau=2)), ("own", own_algorithm(scale=0.5)):
        run = keel.run({**SPEC, "seed": 5}, algorithm=algorithm, out=tmp_path / name, **objects)
        assert shas(compared)[f"custom-custom-{name}-seed5"] == run.summary["model_sha256"]


def test_labels_name_the_methods_in_every_table(compared: keel.Comparison) -> None:
    labels = ["average", "short", "long", "own"]
    assert [row["label"] for row in compared.rows()] == labels
    assert {row["seeds"] for row in compared.rows()} == {2}
    frame = compared.to_frame()
    assert list(frame["label"]) == labels
    assert list(frame["accuracy_mean"]) == [row["accuracy_mean"] for row in compared.rows()]
    assert all(f"| {label} |" in compared.to_markdown() for label in labels)
    assert r"\toprule" in compared.to_latex()


def test_the_baseline_may_be_a_label(compared: keel.Comparison) -> None:
    average, short, *_ = compared.rows()
    assert average["target"] == short["target"] == short["accuracy_mean"]


def test_the_same_call_reuses_ended_runs_and_resumes_others(compared: keel.Comparison) -> None:
    folder = compared.paths[0].parent
    killed = folder / "custom-custom-own-seed5" / "summary.json"
    killed.unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    again = keel.compare({"own": own_algorithm(scale=0.5)}, **{**OBJECTS, "seeds": [3, 5]}, out=folder, progress=False)
    assert killed.exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.rows()[0]["accuracy_seeds"] == compared.rows()[3]["accuracy_seeds"]


def test_another_model_is_not_taken_for_the_one_of_the_ended_runs(compared: keel.Comparison) -> None:
    folder = compared.paths[0].parent
    for changed in {"model": own_model(1)}, {"data": own_data(1)}:
        with one_line_error("that the run started with"):
            keel.compare({"average": "fedavg"}, **{**OBJECTS, "seeds": [3], **changed}, out=folder, progress=False)


def test_models_and_data_may_be_functions_of_the_seed(tmp_path: Path) -> None:
    objects = {**OBJECTS, "seeds": 2, "model": lambda seed: nn.Linear(6, 4), "data": own_data}
    first = keel.compare("fedavg", **objects, out=tmp_path / "a", progress=False)
    again = keel.compare("fedavg", **objects, out=tmp_path / "b", progress=False)
    assert len({*shas(first).values()}) == 2
    assert shas(again) == shas(first)  # PyTorch's generator is seeded for the function
    environments = [RunFolder(path).environment for path in first.paths]
    assert len({environment["partition_sha256"] for environment in environments}) == 2
    assert len({environment["initial_sha256"] for environment in environments}) == 2
    assert first.rows()[0]["seeds"] == 2


def test_over_varies_fields_also_of_an_algorithm_that_is_an_object(tmp_path: Path) -> None:
    over = {"algorithm.scale": np.array([0.5, 1.0]), "local.batch": (np.int64(4),)}
    table = {**SPEC, "local": {"lr": 0.1, "epochs": 1}}
    result = keel.compare(
        [own_algorithm()], **{**OBJECTS, "spec": table, "seeds": np.arange(1)}, over=over, out=tmp_path, progress=False
    )
    assert [row["fields"] for row in result.rows()] == [{"algorithm.scale": 0.5}, {"algorithm.scale": 1.0}]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "custom-custom-scaled-algorithm.scale=0.5,local.batch=4-seed0",
        "custom-custom-scaled-algorithm.scale=1.0,local.batch=4-seed0",
    ]


def test_losses_and_metrics_are_names_or_functions(tmp_path: Path) -> None:
    import torchmetrics  # noqa: F401  before the fork: it takes two seconds, which each worker would take

    inputs = np.random.default_rng(0).normal(size=(48, 6))
    data = keel.federate(inputs, inputs.sum(1), test=(inputs, inputs.sum(1)), clients=6)

    def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).abs().max()

    objects = {**OBJECTS, "data": data, "model": nn.Linear(6, 1), "loss": "mse", "metrics": ["mae", largest_error]}
    result = keel.compare(["fedavg", "ghbm"], **objects, out=tmp_path, progress=False)
    for row in result.rows():
        assert (row["metric"], row["maximize"], row["status"]) == ("mae", False, "finished")
        assert row["mae_mean"] > 0
    assert "| MAE |" in result.to_markdown()
    assert RunFolder(result.paths[0]).records()[-1]["largest_error"] > 0  # type: ignore[typeddict-item]
    assert shas(keel.compare(["fedavg", "ghbm"], **objects, out=tmp_path, progress=False)) == shas(result)


def test_samplers_engines_and_hooks_are_objects_too(tmp_path: Path) -> None:
    from keel.engines.serial import Serial

    class First:
        clients, size, period = 6, 2, 3.0

        def __init__(self, seed: int):
            self.seed = seed

        def cohort(self, round: int) -> np.ndarray:
            return np.array([self.seed, self.seed + 1])

    def mark(record: Any, state: Any, seconds: float) -> None:
        record["mark"] = 7

    table = {key: value for key, value in SPEC.items() if key not in ("participation", "engine")}
    objects = {**OBJECTS, "spec": table, "seeds": [1, 2], "sampler": lambda seed: First(seed), "hooks": [mark]}
    objects["engine"] = lambda workload, workers: Serial(workload)
    result = keel.compare("fedavg", **objects, out=tmp_path, progress=False)
    for seed, path in zip((1, 2), result.paths, strict=True):
        records: list[Any] = RunFolder(path).records()
        assert [(record["cohort"], record["mark"]) for record in records] == [([seed, seed + 1], 7)] * 3
    assert shas(keel.compare("fedavg", **objects, out=tmp_path, progress=False)) == shas(result)


def test_runs_that_diverge_have_a_status_and_no_value(tmp_path: Path) -> None:
    table = {**SPEC, "local": {"lr": 1e30, "epochs": 1}, "evaluation": {"every": 3, "last": 1}}
    objects = {**OBJECTS, "spec": table, "loss": lambda *pair: 1e20 * own_loss()(*pair)}
    result = keel.compare(["fedavg", "ghbm"], **objects, out=tmp_path, progress=False)
    assert [(row["status"], row["accuracy_mean"]) for row in result.rows()] == [("diverged", None)] * 2
    assert "diverged" in result.to_markdown()
    assert "diverged" in result._repr_html_()
    assert list(result.to_frame()["status"]) == ["diverged"] * 2


def test_an_error_in_the_users_code_names_it(tmp_path: Path) -> None:
    class LocalError(Exception):
        def __init__(self, code: int, text: str):
            super().__init__(text)

    def failing(record: Any, state: Any, seconds: float) -> None:
        raise LocalError(3, "out of luck")

    def dividing(record: Any, state: Any, seconds: float) -> None:
        1 / 0  # noqa: B018

    with pytest.raises(RuntimeError, match="LocalError: out of luck"):
        keel.compare("fedavg", **OBJECTS, hooks=[failing], out=tmp_path / "a", progress=False)
    with pytest.raises(ZeroDivisionError):
        keel.compare("fedavg", **OBJECTS, hooks=[dividing], out=tmp_path / "b", progress=False)


def test_the_baseline_may_be_the_name_of_an_own_class(tmp_path: Path) -> None:
    methods = {"average": "fedavg", "mine": own_algorithm()}
    result = keel.compare(methods, **OBJECTS, baseline="scaled", out=tmp_path, progress=False)
    assert result.baseline == "mine"
    assert result.rows()[0]["target"] == result.rows()[1]["accuracy_mean"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts a process in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_every_run_and_the_same_call_continues(tmp_path: Path, interruptible: None) -> None:
    parent = os.getpid()

    def interrupt(record: Any, state: Any, seconds: float) -> None:
        if record["round"] == 2:
            with suppress(FileExistsError):  # of two runs, one sends a signal
                (tmp_path / "sent").touch(exist_ok=False)
                os.kill(parent, signal.SIGINT)

    objects = {**OBJECTS, "spec": {**SPEC, "rounds": 200}, "seeds": 2}
    with pytest.raises(KeyboardInterrupt, match="the same call continues"):
        keel.compare("fedavg", **objects, hooks=[interrupt], out=tmp_path / "out", progress=False)
    folders = [RunFolder(path) for path in (tmp_path / "out").iterdir()]
    assert any(2 <= len(folder.records()) < 200 for folder in folders)
    continued = keel.compare("fedavg", **objects, out=tmp_path / "out", progress=False)
    assert shas(continued) == shas(keel.compare("fedavg", **objects, out=tmp_path / "other", progress=False))


def test_without_fork_runs_are_executed_one_after_the_other(
    compared: keel.Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("keel.runs.parallel.can_fork", lambda: False)
    seen: list[int] = []
    objects = {**OBJECTS, "seeds": [3, 5], "hooks": [lambda record, *_: seen.append(record["round"])]}
    result = keel.compare({"own": own_algorithm(scale=0.5)}, **objects, out=tmp_path, progress=False)
    assert seen == [1, 2, 3] * 2  # in this process
    assert "one after the other" in caplog.text
    expected = shas(compared)
    assert shas(result) == {name: expected[name] for name in shas(result)}


def test_progress_is_printed_as_lines_where_there_is_no_terminal(
    compared: keel.Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = compared.paths[0].parent
    keel.compare({"average": "fedavg"}, **{**OBJECTS, "seeds": [3, 5]}, out=folder)
    assert re.search(r"average: \d of 6 rounds  [\d.]+ kB", capsys.readouterr().err)


def test_a_spec_or_a_file_is_shared_by_all_runs(tmp_path: Path) -> None:
    spec = keel.make_spec({"rounds": 2, "seed": 4, "algorithm": {"name": "ghbm", "tau": 3}, "local": {"lr": 0.2}})
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    for number, source in enumerate((spec, tmp_path / "spec.toml")):
        result = keel.compare(["ghbm", "fedavg"], spec=source, seeds=1, out=tmp_path / str(number), progress=False)
        specs = [RunFolder(path).spec for path in result.paths]
        assert [each.seed for each in specs] == [4, 4]
        assert [each.local.lr for each in specs] == [0.2, 0.2]
        assert specs[0] == spec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": []}, "methods is empty"),
        ({"methods": "fedagv"}, "did you mean 'fedavg'?"),
        ({"methods": [FedAvg]}, "use FedAvg(...) instead of the class"),
        ({"methods": [3]}, "methods must hold names or algorithms (got 3)"),
        ({"methods": [GHBM(tau=1), GHBM(tau=2)]}, "distinguish methods of one name by labels"),
        ({"seeds": 0}, "seeds must be a number above 0 or a list of distinct seeds (got 0)"),
        ({"seeds": [1, 1]}, "(got [1, 1])"),
        ({"over": {"seed": [1]}}, "over does not accept seed; use seeds"),
        ({"over": {"local.lr": 0.1}}, "over requires a list of values for local.lr"),
        (
            {"over": {"data.alpha": [0.1]}},
            "over: data.alpha conflicts with data=, which replaces it; remove one of them",
        ),
        ({"over": {"model.width": [1]}}, "over: model.width conflicts with model="),
        ({"same": ["local.rl"]}, "did you mean 'local.lr'?"),
        ({"model": nn.Linear}, "got the class Linear"),
        ({"model": 3}, "model must be a torch.nn.Module, or a function of the seed that returns one (got 3)"),
        ({"data": lambda seed: None}, "data: the function of the seed must return a keel.FederatedData"),
        ({"spec": {"model": {"name": "mlp"}}}, "model.name = 'mlp' conflicts with model="),
        ({"hooks": [3]}, "hooks must hold functions"),
        ({"baseline": "scaffold"}, "unknown baseline 'scaffold'"),
        ({"workers": 0}, "workers must be a number of processes, at least 1 (got 0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with one_line_error(message):
        keel.compare(**{"methods": "fedavg", **OBJECTS, "out": tmp_path / "out", "progress": False, **arguments})
    assert not list(tmp_path.iterdir())


OWN = """
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)
"""


def test_the_commands_accept_an_own_model_by_name_and_the_options_of_run(
    keel: Callable[..., Called], tmp_path: Path, in_process: None
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    shared = ["--model", "own_net:Net", "--rounds", "1", "--json", "--quiet"]
    words = ["--clients", "20", "--alpha", "0.5", "--partition", "dirichlet", "--lr", "0.2", "--seed", "7"]
    compared = keel("compare", "--methods", "fedavg", "--seeds", "1", *shared, *words, "--out", "c")
    assert compared.code == 0, compared.err
    spec = RunFolder.open(tmp_path / "c" / "digits-net-fedavg-seed7").spec
    assert (spec.data.clients, spec.data.alpha, spec.local.lr, spec.seed) == (20, 0.5, 0.2, 7)
    swept = keel("sweep", *shared, "--over", "model.width=2,3", "--out", "s")
    assert swept.code == 0, swept.err
    assert len(json.loads(swept.out)["points"]) == 2
