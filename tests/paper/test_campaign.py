"""Searches and runs of recipes within a time budget."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.config.defaults import make_spec
from keel.paper.campaign import plan_campaign, run_campaign
from keel.paper.execution import plan_runs, run_parts
from keel.paper.probe import probe
from keel.paper.recipes import Part, all_recipes, campaign_order, find_recipe
from keel.paper.reported import Reported, copy_searches
from keel.paper.results import fields_of, make_result
from keel.paper.run_index import RunIndex, experiment_key, spec_fields
from keel.paper.trials import Search
from keel.runs.compare import run_jobs
from keel.runs.folder import RunFolder
from tests.conftest import Called

SPEC = {"rounds": 3, "evaluation": {"every": 1, "last": 1}}
PART = Part(title="digits, 3 rounds", methods=["fedavg", "ghbm algorithm.beta=0.9"], seeds=2, trials=3, spec=SPEC)
ONE_METHOD = PART.model_copy(update={"methods": ["fedavg"]})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which PART was searched and run. The tests do not change it."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_parts([PART], folder, quiet=True)
    return folder


def test_a_part_is_searched_and_then_run_at_the_best_point(finished: Path) -> None:
    planned = plan_runs(PART, RunIndex(finished))
    for method in PART.methods:
        search = Search(PART, method, finished)
        assert len(search.scores()) == 3
        assert search.worst(planned.points[method]) == max(map(search.worst, map(json.loads, search.scores())))
        assert {spec.local.lr for spec in planned.specs[method]} == {planned.points[method]["local.lr"]}
        assert [spec.evaluation.on for spec in planned.specs[method]] == ["test", "test"]
        assert len(search.ended) == 3 * 5
        assert {trial["seed"] for trial in search.ended} == {100, 101, 102, 103, 104}
    assert list((finished / "trials").glob("*/*")) == []
    assert len(RunIndex(finished).folders) == 4


def test_the_folder_of_a_run_that_was_killed_while_it_was_made_is_no_run(tmp_path: Path) -> None:
    incomplete = tmp_path / "runs" / ".k3x81b_0"
    incomplete.mkdir(parents=True)
    (incomplete / "spec.toml").write_text(make_spec(SPEC).to_toml())
    assert RunIndex(tmp_path).folders == {}


def test_a_point_at_which_one_seed_collapses_is_not_chosen(tmp_path: Path) -> None:
    """The mean of the two search seeds is highest at 0.3; the mean of all five is highest at 0.03."""
    accuracies = {
        0.3: [0.96, 0.95, 0.94, 0.2, 0.9],
        0.1: [0.94, 0.93, 0.93, 0.92, 0.95],
        0.03: [0.93, 0.93, 0.99, 0.99, 0.85],
    }
    search = Search(PART, "fedavg", tmp_path)
    for lr, scores in accuracies.items():
        for seed, score in enumerate(scores, start=100):
            search.ended.append({"point": {"local.lr": lr, "server.lr": 1.0}, "seed": seed, "score": score})
    assert search.best() == {"local.lr": 0.1, "server.lr": 1.0}
    search.ended = [trial for trial in search.ended if trial["seed"] < 102]
    assert search.best() is None
    assert [job.spec.local.lr for job in search.missing()] == [0.3] * 3 + [0.1] * 3 + [0.03] * 3
    assert search.runs_left() == 9


def test_the_runs_that_a_search_has_left_are_counted_without_their_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keel paper list` asks hundreds of searches, and to make their specs would take seconds."""
    search = Search(PART, "fedavg", tmp_path)
    monkeypatch.setattr(Part, "trial_specs", None)
    assert search.best() is None
    assert search.runs_left() == 3 * 5


def test_runs_in_stored_results_are_not_made_again(finished: Path, tmp_path: Path) -> None:
    stored = tmp_path / "results"
    recipe = find_recipe("ladder").model_copy(update={"smoke": [PART], "view": "accuracy"})
    result = make_result(recipe, "smoke", RunIndex(finished))
    for row in result["parts"][0]["rows"]:
        row["probe"] = probe(fields_of(result["parts"][0], row))
    stored.mkdir()
    (stored / "ladder.json").write_text(json.dumps(result))
    copy_searches(finished, stored)
    specs = [spec for planned in plan_runs(PART, RunIndex(finished)).specs.values() for spec in planned]
    elsewhere = tmp_path / "elsewhere"
    assert plan_runs(PART, RunIndex(elsewhere)).unended != []
    assert plan_runs(PART, RunIndex(elsewhere, Reported(stored))).unended == []
    assert RunIndex(elsewhere).unfinished(specs) == specs
    assert RunIndex(elsewhere, Reported(stored)).unfinished(specs) == []
    point = plan_runs(PART, RunIndex(finished)).points["fedavg"]
    more = PART.model_copy(update={"seeds": 3}).specs("fedavg", None, point)
    assert [spec.seed for spec in RunIndex(elsewhere, Reported(stored)).unfinished(more)] == [2]
    result["parts"][0]["rows"][0]["probe"][0] *= 2  # the code has changed what it computes
    (stored / "ladder.json").write_text(json.dumps(result))
    assert RunIndex(elsewhere, Reported(stored)).unfinished(specs) == specs[:2]


def test_a_search_continues_with_the_trials_that_are_left(tmp_path: Path) -> None:
    run_parts([ONE_METHOD.model_copy(update={"trials": 2})], tmp_path, quiet=True)
    before = {path.name: path.read_text().rstrip("\n]") for path in (tmp_path / "searches").glob("*.json")}
    run_parts([ONE_METHOD], tmp_path, quiet=True)
    assert len(before) == 1
    for name, text in before.items():
        assert (tmp_path / "searches" / name).read_text().startswith(text)


def test_the_search_of_a_field_that_a_method_fixes_is_another_search(tmp_path: Path) -> None:
    methods = ("ghbm", "ghbm algorithm.beta=0.9", "ghbm algorithm.tau=5")
    files = {Search(PART, method, tmp_path).file for method in methods}
    assert len(files) == 3


def test_a_result_names_the_trials_and_the_chosen_point(finished: Path) -> None:
    recipe = find_recipe("ladder").model_copy(update={"smoke": [PART], "view": "accuracy"})
    [part] = make_result(recipe, "smoke", RunIndex(finished))["parts"]
    for row in part["rows"]:
        assert (row["trials"], row["runs"], len(row["accuracy_seeds"])) == (3, 2, 2)
        assert set(row["chosen"]) == {"local.lr", "server.lr"}
        assert set(row["open_fields"]) <= {"local.lr", "server.lr"}
        assert row["open_fields"]  # three trials cannot have tried both sides of two fields


def test_a_campaign_stops_at_its_budget_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.paper.execution.BATCH", 2)
    steps = plan_campaign(tmp_path, "smoke", ["ladder"])
    assert [step.trials for step in steps] == [20, 0]
    lines: list[str] = []
    assert run_campaign(steps, tmp_path, 0.0, True, lines.append) == steps
    assert lines == []
    ended = run_campaign(steps, tmp_path, 1.0, True, lines.append)
    assert not any(step.left for step in ended)
    assert [line.partition(",")[0] for line in lines] == ["ladder: digits", "ladder: digits"]


def test_the_runs_of_one_seed_come_before_those_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a campaign that is stopped leaves methods with equal seeds."""
    started = list[int]()
    monkeypatch.setattr("keel.paper.execution.run_jobs", lambda jobs, quiet: started.extend(j.spec.seed for j in jobs))
    assert not run_parts([PART.model_copy(update={"trials": None})], tmp_path, quiet=True)
    assert started == [0, 0, 1, 1]


def test_the_campaign_contains_every_recipe_with_runs() -> None:
    with_runs = [name for name, recipe in all_recipes().items() if any(part.methods for part in recipe.desktop)]
    assert sorted(campaign_order()) == sorted(with_runs)


def test_the_command_prints_what_is_left(keel: Callable[..., Called], tmp_path: Path) -> None:
    called = keel("campaign", "ladder", "--scale", "smoke", "--dry-run", "--out", str(tmp_path / "runs"))
    assert "ladder: digits, alpha = 0, 6 rounds, searched: 20 trials and 4 runs left" in called.out
    assert "Next: ladder: digits" in called.out
    assert not (tmp_path / "runs").exists()


def test_a_trial_that_an_older_version_began_is_made_again(tmp_path: Path) -> None:
    [job, *_] = Search(PART, "fedavg", tmp_path).missing()
    run_jobs([job], quiet=True)
    folder = RunFolder(job.path)
    folder.replace("environment.json", json.dumps({**folder.environment, "source_sha256": "another"}).encode())
    assert run_parts([ONE_METHOD], tmp_path, quiet=True)


def test_a_field_that_was_added_later_does_not_change_the_experiment_at_its_default() -> None:
    plain = experiment_key(make_spec({}))
    assert "largest_weight" not in plain
    assert "server.largest_weight" not in spec_fields(make_spec({}))
    assert experiment_key(make_spec({"server": {"largest_weight": 1.0, "clip": False}})) == plain
    assert experiment_key(make_spec({"server": {"largest_weight": 0.5}})) != plain
    assert experiment_key(make_spec({"server": {"clip": "adaptive"}})) != plain
    assert json.loads(plain)["server"].keys() == {"lr", "schedule", "decay", "warmup", "weighting"}
