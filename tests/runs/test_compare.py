"""The runs of a comparison, and the command that makes them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keel import KeelError, make_spec, run
from keel.runs.compare import baseline_of, jobs_of
from keel.runs.estimate import estimate
from keel.runs.folder import RunFolder
from keel.units import size
from tests.cli.calling import call_keel
from tests.conftest import Called, jobs_in_process
from tests.contract.own import Lookahead

Keel = Callable[..., Called]


def test_jobs_are_methods_by_values_by_seeds(tmp_path: Path) -> None:
    jobs = jobs_of({"rounds": 3, "seed": 7}, ["fedavg", "ghbm"], 2, ["data.alpha=0.0,1.5"], tmp_path)
    assert [job.path.name for job in jobs[:4]] == [
        "digits-mlp-fedavg-data.alpha=0.0-seed7", "digits-mlp-fedavg-data.alpha=0.0-seed8",
        "digits-mlp-fedavg-data.alpha=1.5-seed7", "digits-mlp-fedavg-data.alpha=1.5-seed8",
    ]  # fmt: skip
    assert len(jobs) == 8
    assert jobs[2].spec == make_spec({"rounds": 3, "seed": 7, "algorithm": {"name": "fedavg"}, "data": {"alpha": 1.5}})


def test_hyper_parameters_of_a_named_algorithm_apply_to_it_alone(tmp_path: Path) -> None:
    table = {"algorithm": {"name": "ghbm", "tau": 3}}
    fedavg, ghbm = jobs_of(table, ["fedavg", "ghbm"], 1, [], tmp_path)
    assert ghbm.spec.algorithm.settings()["tau"] == 3
    assert "tau" not in fedavg.spec.algorithm.settings()
    assert [job.spec.algorithm.name for job in jobs_of(table, [], 1, [], tmp_path)] == ["ghbm"]


def test_a_method_given_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="digits-mlp-ghbm-seed0 twice"):
        jobs_of({}, ["ghbm", "ghbm"], 1, [], tmp_path)


def values(field: str, methods: list[str], same: list[str], table: dict[str, Any] | None = None) -> list[Any]:
    """Return the value of local.lr or server.lr in the job of each method."""
    section, name = field.split(".")
    return [getattr(getattr(j.spec, section), name) for j in jobs_of(table or {}, methods, 1, [], Path("x"), same)]


def test_same_gives_all_methods_the_value_of_the_first() -> None:
    methods = ["fedavg", "fedavgm", "tests.contract.own:Lookahead"]
    own = values("local.lr", methods, [])
    assert own == [0.5, 0.3, 0.1]
    assert values("local.lr", methods, ["local.lr"]) == [0.5] * 3
    assert values("local.lr", methods[::-1], ["local.lr"]) == [0.1] * 3
    assert values("local.lr", methods, ["server.lr"]) == own


def test_a_value_that_is_set_holds_for_all_methods_with_same() -> None:
    assert values("local.lr", ["fedavg", "ghbm"], ["local.lr"], {"local": {"lr": 0.05}}) == [0.05] * 2


def test_same_takes_the_value_of_the_first_method_at_each_value_of_over(tmp_path: Path) -> None:
    over = ["data.name=digits,mnist"]
    jobs = jobs_of({}, ["fedavg", "ghbm"], 1, over, tmp_path, ["local.lr", "local.batch"])
    rates = {(job.spec.data.name, job.spec.algorithm.name): job.spec.local.lr for job in jobs}
    for name in ("digits", "mnist"):
        assert rates[name, "ghbm"] == rates[name, "fedavg"]
        assert rates[name, "fedavg"] == make_spec({"algorithm": {"name": "fedavg"}, "data": {"name": name}}).local.lr


def test_same_accepts_a_hyper_parameter_that_all_methods_have() -> None:
    jobs = jobs_of({}, ["ghbm", "fedavgm"], 1, [], Path("x"), ["algorithm.beta"])
    assert len({job.spec.algorithm.settings()["beta"] for job in jobs}) == 1
    with pytest.raises(KeelError, match="beta"):
        jobs_of({}, ["ghbm", "fedavg"], 1, [], Path("x"), ["algorithm.beta"])


def test_same_cannot_unset_a_default_of_another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"any": {"with": {"ghbm": {"local": {"clip": 1.0}}}}, "digits": {}}
    monkeypatch.setattr("keel.config.defaults.defaults", lambda: content)
    expected = r"^--same local.clip: fedavg's value is not valid for ghbm; give one with --set local.clip=$"
    table = {"data": {"clients": 10}, "local": {"epochs": 1}}
    with pytest.raises(KeelError, match=expected):
        jobs_of(table, ["fedavg", "ghbm"], 1, [], Path("x"), ["local.clip"])


OWN = "tests.contract.own:Lookahead"


@pytest.mark.parametrize("target", [OWN, "lookahead"])
def test_the_target_is_named_as_in_the_spec_or_in_the_class(
    keel: Keel, tmp_path: Path, in_process: None, target: str
) -> None:
    jobs = jobs_of({}, ["fedavg", OWN], 2, [], tmp_path)
    assert baseline_of(target, jobs) == OWN
    assert baseline_of("fedavg", jobs) == "fedavg"
    called = keel("compare", "--methods", OWN, "--seeds", "1", "--rounds", "1", "--target", target, "--json", "--quiet")
    assert called.code == 0, called.err
    assert json.loads(called.out)[0]["target"] is not None


class SameName(Lookahead):
    """Another class with the same name."""


def test_a_target_that_names_two_algorithms_is_an_error(tmp_path: Path) -> None:
    same = f"{__name__}:SameName"
    jobs = jobs_of({}, [OWN, same], 1, [], tmp_path)
    with pytest.raises(KeelError, match=rf"^--target 'lookahead' is ambiguous; name one of {OWN}, {same}$"):
        baseline_of("lookahead", jobs)


COMPARE = ["compare", "--seeds", "2", "--rounds", "6", "--out", "them"]


@dataclass(frozen=True)
class Commands:
    """Two commands with the same --out; one run of the first counts as killed before the second."""

    folder: Path
    scaffold: Called
    both: Called
    accuracy: float
    """Of the run that was continued, before it was."""
    untouched: bool
    """Whether the finished run kept its files."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    folder = tmp_path_factory.mktemp("compare")
    scaffold = call_keel(folder, *COMPARE, "--methods", "scaffold")
    assert scaffold.code == 0, scaffold.err
    finished, killed = (folder / f"them/digits-mlp-scaffold-seed{seed}/summary.json" for seed in (0, 1))
    accuracy = json.loads(killed.read_text())["accuracy"]
    killed.unlink()
    before = finished.stat().st_mtime_ns
    with jobs_in_process():
        both = call_keel(folder, *COMPARE, "--methods", "fedavg,scaffold", "--json", "--quiet")
    assert both.code == 0, both.err
    return Commands(folder, scaffold, both, accuracy, finished.stat().st_mtime_ns == before)


def test_finished_runs_are_reused_and_others_continued(commands: Commands) -> None:
    fedavg, scaffold = json.loads(commands.both.out)
    assert [(row["algorithm"], row["seeds"]) for row in (fedavg, scaffold)] == [("fedavg", 2), ("scaffold", 2)]
    assert commands.untouched
    assert scaffold["accuracy_seeds"][1] == commands.accuracy
    assert len(list(commands.folder.glob("them/*/summary.json"))) == 4


def test_the_page_shows_all_runs_in_its_folder(commands: Commands) -> None:
    assert "SCAFFOLD" in commands.scaffold.out
    assert "FedAvg" not in commands.scaffold.out
    page = (commands.folder / "them/report.html").read_text()
    assert '<th scope="row">FedAvg</th>' in page
    assert '<th scope="row">SCAFFOLD</th>' in page


def test_progress_lines_name_the_run_of_an_accuracy(commands: Commands) -> None:
    lines = [line for line in commands.scaffold.err.splitlines() if line.startswith("SCAFFOLD: ")]
    assert any("%" in line for line in lines)
    assert all("% (seed 0)" in line or "% (seed 1)" in line for line in lines if "%" in line)


def test_the_progress_of_a_resumed_comparison_includes_the_bytes_before_the_stop(
    keel: Keel, tmp_path: Path, in_process: None
) -> None:
    (job,) = jobs_of({"rounds": 6}, ["fedavg"], 1, [], tmp_path / "out")
    rounds: list[int] = []
    run(
        job.spec, out=job.path, hooks=[lambda record, *_: rounds.append(record["round"])], stop=lambda: len(rounds) == 3
    )
    called = keel("compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "6", "--out", "out")
    assert called.code == 0, called.err
    records = RunFolder(job.path).records()
    total = size(sum(record["bytes_down"] + record["bytes_up"] for record in records))
    assert f"FedAvg: 6 of 6 rounds  {total}  " in called.err


def test_fields_that_differ_are_printed_under_the_table(commands: Commands) -> None:
    assert [row["differing"]["local.lr"] for row in json.loads(commands.both.out)] == [0.5, 0.3]
    note = "local.lr differs: 0.5 (FedAvg), 0.3 (SCAFFOLD)"
    text = call_keel(commands.folder, "report", "them").out
    assert text.index("SCAFFOLD") < text.index(note)
    assert note in (commands.folder / "report.html").read_text()
    for form in ("markdown", "latex"):
        assert "local.lr differs" in call_keel(commands.folder, "report", "them", "--format", form).out
    alone = call_keel(commands.folder, "report", "them/digits-mlp-scaffold-seed0").out
    assert "differs" not in alone


def test_a_dry_run_estimates_resources_and_writes_nothing(keel: Keel, tmp_path: Path) -> None:
    command = [*COMPARE, "--methods", "fedavg,ghbm", "--dry-run"]
    called = keel(*command, "--json", "--set", "network.up_mbps=1.0")
    assert called.code == 0, called.err
    fedavg, ghbm = json.loads(called.out)
    assert (fedavg["runs"], fedavg["rounds"]) == (2, 6)
    assert fedavg["seconds"] > 0
    assert ghbm["bytes"] == 1.5 * fedavg["bytes"]
    assert not list(tmp_path.iterdir())
    shown = keel(*command).out
    assert "4 runs: about" in shown
    assert "federation" not in shown


def test_the_estimate_has_the_bytes_of_the_run(keel: Keel, tmp_path: Path) -> None:
    spec = make_spec({"rounds": 5, "algorithm": {"name": "mimemom"}, "network": {"latency_ms": 1000.0}})
    estimated = estimate(spec)
    ended = json.loads(keel("run", "--algorithm", "mimemom", "--rounds", "5", "--json", "--quiet").out)
    assert estimated.bytes == ended["bytes_up"] + ended["bytes_down"]
    assert estimated.federation_seconds is not None
    assert estimated.federation_seconds > 5 * 2 * 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "fedagv"], "did you mean 'fedavg'?"),
        (["--methods", "ghbm", "--over", "local.lr"], "'local.lr'"),
        (["--methods", "ghbm", "--over", "local.lr=0.1..1.0"], "--over requires a list of values for local.lr"),
        (["--methods", "ghbm", "--over", "seed=1,2"], "--over does not accept seed; use --seeds"),
        (["--methods", "ghbm", "--same", "local.rl"], "did you mean 'local.lr'?"),
        (["--methods", "ghbm", "--same", "seed"], "--same does not accept seed"),
        (["--format", "html", "--methods", "fedavg"], "'html' is not one of 'text', 'markdown', 'latex', 'csv'"),
        (["--methods", "fedavg", "--set", "network.up=3"], "down_mbps"),
        ([], "--methods is required; name algorithms with commas between"),
        (["--methods", "fedavg", "--target", "ghbm"], "'ghbm'"),
        (["--methods", "fedavg", "--target", "90"], "--target must be above 0 and at most 1 for accuracy"),
        (["--methods", "fedavg", "--target", "nan"], "(got nan)"),
        (["--methods", "fedavg", "--json", "--format", "csv"], "--json and --format csv exclude each other"),
        (["--methods", "fedavg", "--over", "data.alhpa=0,1"], "did you mean 'alpha'?"),
        (["--methods", "fedavg", "--over", "model.hiden=1"], "did you mean 'hidden'?"),
        (["--set", "algorithm=ghbm"], "algorithm must be a table (got 'ghbm')"),
    ],
)
def test_a_mistake_is_one_line(keel: Keel, tmp_path: Path, words: list[str], message: str) -> None:
    called = keel("compare", "--rounds", "2", "--seeds", "1", *words)
    assert called.code == 2
    assert message in called.err
    assert called.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("seeds", "values"), [(10**20, 1), (10**6, 1), (50_000, 3)])
def test_more_runs_than_any_machine_can_do_are_refused(seeds: int, values: int) -> None:
    over = ["local.lr=" + ",".join(f"0.{i + 1}" for i in range(values))]
    with pytest.raises(
        KeelError, match=r"^this asks for [\d,]+ runs, but 100,000 are the most; use fewer values or seeds$"
    ):
        jobs_of({}, ["fedavg"], seeds, over, Path("x"))
