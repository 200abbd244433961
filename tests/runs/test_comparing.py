import json
from collections.abc import Callable
from pathlib import Path

import pytest

from keel import KeelError, make_spec
from keel.runs.comparing import jobs_of
from keel.runs.price import price
from tests.conftest import Called

Keel = Callable[..., Called]


def test_methods_by_values_by_seeds(tmp_path: Path) -> None:
    jobs = jobs_of({"rounds": 3, "seed": 7}, ["fedavg", "ghbm"], 2, ["data.alpha=0.0,1.5"], tmp_path)
    assert [job.path.name for job in jobs[:4]] == [
        "digits-mlp-fedavg-data.alpha=0.0-seed7", "digits-mlp-fedavg-data.alpha=0.0-seed8",
        "digits-mlp-fedavg-data.alpha=1.5-seed7", "digits-mlp-fedavg-data.alpha=1.5-seed8",
    ]  # fmt: skip
    assert len(jobs) == 8
    assert jobs[2].spec == make_spec({"rounds": 3, "seed": 7, "algorithm": {"name": "fedavg"}, "data": {"alpha": 1.5}})


def test_settings_of_an_algorithm_are_for_that_one_alone(tmp_path: Path) -> None:
    table = {"algorithm": {"name": "ghbm", "tau": 3}}
    fedavg, ghbm = jobs_of(table, ["fedavg", "ghbm"], 1, [], tmp_path)
    assert ghbm.spec.algorithm.settings()["tau"] == 3
    assert "tau" not in fedavg.spec.algorithm.settings()
    assert [job.spec.algorithm.name for job in jobs_of(table, [], 1, [], tmp_path)] == ["ghbm"]


def test_a_method_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="digits-mlp-ghbm-seed0 is there twice"):
        jobs_of({}, ["ghbm", "ghbm"], 1, [], tmp_path)


COMPARE = ["compare", "--methods", "fedavg,ghbm", "--seeds", "2", "--rounds", "6", "--out", "them"]


def test_runs_that_exist_are_not_run_again(keel: Keel, tmp_path: Path) -> None:
    first = keel(*COMPARE, "--json", "--quiet")
    assert first.code == 0, first.err
    rows = json.loads(first.out)
    assert [(row["algorithm"], row["seeds"]) for row in rows] == [("fedavg", 2), ("ghbm", 2)]
    assert (tmp_path / "them/report.html").exists()
    (tmp_path / "them/digits-mlp-ghbm-seed1/summary.json").unlink()  # as if it had been killed
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("them/*/summary.json")}
    again = keel(*COMPARE, "--json", "--quiet")
    assert [row["accuracy_seeds"] for row in json.loads(again.out)] == [row["accuracy_seeds"] for row in rows]
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert len(list(tmp_path.glob("them/*/summary.json"))) == 4


def test_a_dry_run_says_what_it_takes_and_writes_nothing(keel: Keel, tmp_path: Path) -> None:
    called = keel(*COMPARE, "--dry-run", "--json", "--set", "network.up_mbps=1.0")
    assert called.code == 0, called.err
    fedavg, ghbm = json.loads(called.out)
    assert (fedavg["runs"], fedavg["rounds"]) == (2, 6)
    assert fedavg["seconds"] > 0
    assert ghbm["bytes"] == 1.5 * fedavg["bytes"]
    assert not list(tmp_path.iterdir())
    shown = keel(*COMPARE, "--dry-run").out
    assert "4 runs: about" in shown
    assert "federation" not in shown


def test_the_price_is_that_of_the_run(keel: Keel, tmp_path: Path) -> None:
    spec = make_spec({"rounds": 5, "algorithm": {"name": "mimemom"}, "network": {"latency_ms": 1000.0}})
    found = price(spec)
    ended = json.loads(keel("run", "--algorithm", "mimemom", "--rounds", "5", "--json", "--quiet").out)
    assert found.bytes == ended["bytes_up"] + ended["bytes_down"]
    assert found.federation_seconds is not None
    assert found.federation_seconds > 5 * 2 * 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "fedagv"], "algorithm.name: 'fedagv' is not known; did you mean 'fedavg'?"),
        (["--methods", "ghbm", "--over", "local.lr"], "--over: 'local.lr'; accepted: key=value,value"),
        (
            ["--methods", "ghbm", "--over", "local.lr=0.1..1.0"],
            "--over: local.lr has a range; accepted: local.lr=value,value,...",
        ),
        (["--format", "html", "--methods", "fedavg"], "'html' is not one of 'text', 'markdown', 'latex', 'csv'"),
        (["--methods", "fedavg", "--set", "network.up=3"], "network: 'up' is not known; accepted: down_mbps"),
        ([], "--methods: none; accepted: algorithms with commas between"),
        (["--methods", "fedavg", "--target", "ghbm"], "--target: 'ghbm' is not known"),
        (["--methods", "fedavg", "--target", "90"], "--target: 90; accepted: an accuracy above 0 up to 1"),
        (["--methods", "fedavg", "--target", "nan"], "--target: nan; accepted: an accuracy above 0 up to 1"),
        (["--methods", "fedavg", "--json", "--format", "csv"], "--json, --format csv: both are given"),
        (
            ["--methods", "fedavg", "--over", "data.alhpa=0,1"],
            "data (digits): 'alhpa' is not known; did you mean 'alpha'?",
        ),
        (
            ["--methods", "fedavg", "--over", "model.hiden=1"],
            "model (mlp): 'hiden' is not known; did you mean 'hidden'?",
        ),
        (["--set", "algorithm=ghbm"], "algorithm: 'ghbm' is not a table; accepted: [algorithm]"),
    ],
)
def test_mistakes_are_one_line(keel: Keel, tmp_path: Path, words: list[str], message: str) -> None:
    called = keel("compare", "--rounds", "2", "--seeds", "1", *words)
    assert called.code == 2
    assert message in called.err
    assert called.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_page_shows_what_its_folder_holds(keel: Keel, tmp_path: Path) -> None:
    for name in ("fedavg", "ghbm"):
        called = keel("compare", "--methods", name, "--seeds", "1", "--rounds", "3", "--out", "them", "--quiet")
        assert called.code == 0, called.err
    assert "GHBM" in called.out
    assert "FedAvg" not in called.out
    page = (tmp_path / "them/report.html").read_text()
    assert '<th scope="row">FedAvg</th>' in page
    assert '<th scope="row">GHBM</th>' in page


def test_lines_of_several_runs_say_whose_accuracy_it_is(keel: Keel) -> None:
    lines = keel("compare", "--methods", "fedavg", "--seeds", "2", "--rounds", "3").err.splitlines()
    told = [line for line in lines if line.startswith("FedAvg: ")]
    assert told
    assert all("% (seed 0)" in line or "% (seed 1)" in line for line in told if "%" in line)
