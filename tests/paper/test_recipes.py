"""Recipes of the paper's tables and figures: protocols, listing and estimates. Nothing here trains to the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keel.algorithms import REGISTRY
from keel.config.defaults import make_spec
from keel.errors import KeelError
from keel.paper.computed import GRIDS, RATES, data_statistics
from keel.paper.estimate import estimate_parts, estimate_sheets, format_listing, list_recipes
from keel.paper.execution import plan_runs
from keel.paper.printed import printed_tables
from keel.paper.recipes import FINAL_SEEDS, SCALES, Part, all_recipes, find_recipe, rough_seconds
from keel.paper.results import make_result
from keel.paper.run_index import RunIndex
from keel.paper.views import make_view
from tests.conftest import Called

Keel = Callable[..., Called]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The listing of an empty folder, without installed data sets."""
    folder = tmp_path_factory.mktemp("listing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEEL_DATA", str(folder / "no data"))
        return list_recipes(folder)


def test_the_listing_has_every_recipe_and_says_which_data_are_missing(listing: list[dict[str, Any]]) -> None:
    assert [row["name"] for row in listing] == list(all_recipes())
    scales = {row["name"]: row["scales"] for row in listing}
    assert all(counts["smoke"]["missing"] == [] for counts in scales.values())
    large = scales["large-scale"]["paper"]
    assert large["runs"] == 8 * 6 * 5
    assert large["needs"] == ["landmarks", "inaturalist", "stackoverflow"]
    lines = [line for _, line in format_listing(listing, Path("runs/paper"))]
    assert any(line.startswith("Table 2: final accuracy of every method") for line in lines)
    assert any(line.startswith("Missing: ") and "landmarks" in line for line in lines)


def test_the_listing_counts_searches_and_runs_without_a_measured_time(listing: list[dict[str, Any]]) -> None:
    scales = {row["name"]: row["scales"] for row in listing}
    smoke = scales["ladder"]["smoke"]
    assert (smoke["runs"], smoke["searched"], smoke["rounds"]) == (8, 20, 28 * 6)
    assert smoke["seconds"] == pytest.approx(28 * 6 * 0.01)
    curves = scales["curves"]["paper"]
    assert curves["unmeasured"] == 6 * 5  # those of Stack Overflow
    assert curves["seconds"] == pytest.approx(2 * 11 * 5 * 10_000 * 11)
    large = scales["large-scale"]["desktop"]
    assert large["searched"] == 2 * 6 * (15 * 2 + 3 * 3)
    assert large["rounds"] == 2 * 6 * 5 * 1000 + large["searched"] * 300
    lines = [line for _, line in format_listing(listing, Path("runs/paper"))]
    assert any(line.startswith("paper: 0 of 140 runs, at least") for line in lines)


def test_every_recipe_has_valid_specs_at_every_scale() -> None:
    index = RunIndex(Path("no runs"))
    for recipe in all_recipes().values():
        for scale in SCALES:
            for part in recipe.parts(scale):
                planned = plan_runs(part, index)
                assert all(planned.specs.values())
                if scale == "paper":
                    assert part.seeds == 5 or not part.methods
                    specs = [specs[0] for specs in planned.specs.values()]
                    assert all(getattr(spec.algorithm, "tau_i", "actual") == "actual" for spec in specs), recipe.name


def test_the_paper_scale_has_the_printed_protocol() -> None:
    [spec, *_] = find_recipe("controlled").paper[0].specs("fedhbm")
    assert (spec.rounds, spec.evaluation.last, spec.data.alpha, spec.participation.rate) == (10000, 100, 0.0, 0.1)
    for name in ("controlled", "controlled-cifar10", "large-scale", "cost"):
        for part in find_recipe(name).paper:
            assert all(spec.evaluation.last == 100 for spec in part.specs("fedavg"))
    for part in find_recipe("large-scale").paper:  # whose clients differ in size
        assert all(spec.server.weighting == "uniform" for spec in part.specs("fedavg"))


@pytest.mark.parametrize("column", GRIDS)
def test_defaults_are_the_papers_best_hyperparameters(column: str) -> None:
    _, data, model = GRIDS[column]
    best = printed_tables()["hyperparameters"][column]
    for method in best.keys() - {"all"}:
        spec = make_spec({"data": {"name": data}, "model": {"name": model}, "algorithm": {"name": method}})
        for name, value in {**best["all"], **best[method]}.items():
            table, field = name.split(".")
            default = getattr(getattr(spec, table), field)
            assert (round(1 / spec.participation.rate) if default == "period" else default) == value, (method, name)


def test_a_round_of_centralized_training_is_an_epoch() -> None:
    parts = [part for scale in SCALES for part in find_recipe("centralized").parts(scale)]
    specs = [spec for part in parts for spec in part.specs("centralized")]
    assert {spec.data.name for spec in specs} >= {"cifar10", "cifar100", "shakespeare", "stackoverflow", "landmarks"}
    assert all((spec.local.epochs, spec.local.steps) == (1, None) for spec in specs)
    pair = [make_spec({"rounds": 1, "algorithm": {"name": name}}) for name in ("fedavg", "centralized")]
    federated, centralized = map(rough_seconds, pair)
    assert federated is not None
    assert centralized == pytest.approx(20 * federated)  # ten times the clients, on one of the two cores


@pytest.mark.parametrize(
    ("local", "steps"),
    [({"epochs": 2, "batch": 8}, "4"), ({"epochs": 2, "batch": 8, "drop_last": True}, "2"), ({"steps": 7}, "7")],
)
def test_the_data_table_counts_local_steps_as_training_does(local: dict[str, Any], steps: str) -> None:
    assert data_statistics(make_spec({"local": local}))[4] == steps  # a client has 14 digits


def test_searches_do_not_use_the_reported_seeds() -> None:
    def searched(part: Part) -> None:
        for method in part.methods:
            lattice = part.lattice(method)
            assert lattice is not None
            [first] = lattice.next_points({}, 1)
            trials = [*part.trial_specs(method, first), *part.trial_specs(method, first, FINAL_SEEDS)]
            assert {spec.evaluation.on for spec in trials} == {"validation"}
            assert not {spec.seed for spec in trials} & {spec.seed for spec in part.specs(method)}
        assert f"the best of {part.trials} points" in part.how_tuned()
        assert "(100 to 104) is reported" in part.how_tuned()

    parts = {part.title: part for recipe in all_recipes().values() for scale in SCALES for part in recipe.parts(scale)}
    for part in parts.values():
        if part.trials:
            searched(part)


def test_models_are_pretrained_where_the_papers_are() -> None:
    for part in [part for name in ("large-scale", "cost", "centralized") for part in find_recipe(name).paper]:
        spec = part.specs(part.methods[0])[0]
        pretrained = bool(spec.model.model_dump().get("pretrained"))
        assert pretrained == (spec.data.name in ("landmarks", "inaturalist")), part.title


def test_methods_with_guessed_hyperparameters_are_marked() -> None:
    index = RunIndex(Path("no runs"))
    [sheet] = make_view(make_result(find_recipe("controlled-cifar10"), "paper", index)).sheets
    assert sheet.columns[1:3] == ["CIFAR-10, ResNet-20, non-IID", "paper"]
    marked = {row[0] for row in sheet.rows if row[1].endswith(" †")}
    assert {"AdaBest", "FedADC", "LocalGHBM"} <= marked
    assert {"FedAvg", "FedHBM"} & marked == set()


def test_the_papers_numbers_are_shown_as_printed() -> None:
    view = make_view(make_result(find_recipe("large-scale"), "paper", RunIndex(Path("no runs"))))
    [sheet] = view.sheets
    ghbm = dict(zip(sheet.columns, next(row for row in sheet.rows if row[0] == "GHBM"), strict=True))
    assert ghbm["GLDv2, MobileNetV2, C = 0.79 %"] == "not run †"
    assert ghbm["Stack Overflow, C = 0.12 %"] == "not run"
    fedavg, scaffold = sheet.rows[:2]
    column = sheet.columns.index("iNaturalist, MobileNetV2, C = 0.5 %") + 1
    assert sheet.columns[column] == "paper"
    assert (fedavg[column], scaffold[column]) == ("45.25 ± 0.1 %", "diverged")
    records = {(record["part"], record["method"]): record for record in view.records}
    assert records["iNaturalist, MobileNetV2, C = 0.5 %", "fedavg"]["paper_mean"] == "45.25"
    assert records["iNaturalist, MobileNetV2, C = 0.5 %", "scaffold"]["paper_mean"] == "diverged"


def test_a_label_keeps_the_decimal_point_of_an_override() -> None:
    rows = make_result(find_recipe("theory"), "paper", RunIndex(Path("no runs")))["parts"][0]["rows"]
    assert [row["label"] for row in rows] == ["GHBM", "GHBM (theory) lr=0.01 server.lr=0.01 beta=0.1"]


def test_missing_runs_are_reported_with_the_command_that_runs_them() -> None:
    result = make_result(find_recipe("alpha"), "smoke", RunIndex(Path("no runs")), seeds=3)
    assert result["command"] == "keel paper run alpha --scale smoke --seeds 3"
    note = make_view(result, " --out elsewhere").notes[-1]
    assert note == "12 runs missing: keel paper run alpha --scale smoke --seeds 3 --out elsewhere"


def test_a_recipe_is_found_by_its_number_in_the_paper() -> None:
    assert find_recipe("Table 2") is find_recipe("table 2") is find_recipe("controlled")
    for name in ("Table 20", "nothing"):
        with pytest.raises(KeelError, match=name):
            find_recipe(name)


def test_every_printed_number_has_a_method_in_the_recipe() -> None:
    for recipe in all_recipes().values():
        if recipe.view in ("accuracy", "cost"):
            for part in recipe.paper:
                printed = printed_tables()[recipe.view].get(part.printed, {})
                assert set(printed) == {method.split()[0] for method in part.methods}, (recipe.name, part.title)


NOT_IN_THE_PAPER = {
    *("fednova", "fedexp", "fedsam", "mofedsam", "fedlesam", "fedspeed", "delta_sgd", "fedadamw"),
    *("diloco", "fedper", "ditto", "ghbm_lookahead"),
}
"""Methods that neither the paper nor its references on server momentum compare; docs/results.md has them."""


def test_the_digits_recipe_has_every_algorithm_of_the_paper() -> None:
    assert set(find_recipe("digits").desktop[0].methods) == set(REGISTRY) - {"centralized"} - NOT_IN_THE_PAPER


def test_a_recipe_that_is_not_in_the_paper_has_no_paper_scale(keel: Keel) -> None:
    called = keel("paper", "run", "digits", "--scale", "paper")
    assert called.code == 2
    expected = "digits is not in the paper; use --scale desktop or --scale smoke (got --scale paper)"
    assert called.err == f"keel: {expected}\n"
    assert "did you mean 'tau'?" in keel("paper", "run", "taus").err


def test_missing_data_give_one_line_and_write_nothing(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "none"))
    called = keel("paper", "run", "large-scale", "--scale", "paper", "--out", tmp_path / "out")
    assert (called.code, called.out) == (2, "")
    assert called.err.count("\n") == 1
    assert "landmarks" in called.err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_describes_the_runs(tmp_path: Path) -> None:
    reported: list[str] = []
    [sheet] = estimate_sheets(estimate_parts(find_recipe("theory").smoke, tmp_path, None, reported.append))
    assert reported == [f"digits, alpha = 0, 6 rounds: {method}" for method in ("ghbm", "ghbm_theory")]
    assert "rounds 6, data.clients 100, participation.rate 0.1, local.epochs 2, local.batch 8" in sheet.title
    assert sheet.rows[0][-1] == "local.lr 0.5, server.lr 1.0, beta 0.9, tau period"


def test_a_dry_run_estimates_missing_runs_and_tolerates_missing_data(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "none"))
    called = keel("paper", "run", "tau", "--out", tmp_path / "out", "--dry-run", "--seeds", "2")
    assert called.code == 0, called.err
    assert "8 runs: about" in called.out
    assert not (tmp_path / "out").exists()
    rows = json.loads(keel("paper", "run", "centralized", "--scale", "paper", "--dry-run", "--json").out)
    assert all("missing" in row and row["rounds"] for row in rows)


def test_an_unreadable_run_folder_is_named(tmp_path: Path, keel: Keel) -> None:
    (tmp_path / "runs" / "odd").mkdir(parents=True)
    (tmp_path / "runs" / "odd" / "spec.toml").write_text("rounds = 3\n")
    called = keel("paper", "run", "tau", "--scale", "smoke", "--out", tmp_path)
    assert called.code == 2
    assert f"{tmp_path}/runs/odd/spec.toml" in called.err


def test_the_documents_have_the_same_names_and_rates() -> None:
    listed = (DOCS / "paper.md").read_text().partition("| name | in the paper | shows |\n|---|---|---|\n")[2]
    lines = listed.partition("\n\n")[0].splitlines()
    assert lines == [f"| `{r.name}` | {r.number or '-'} | {r.shows} |" for r in all_recipes().values()]
    letters = {"Δ": "Delta", "σ²": "sigma^2", "ζ²": "zeta^2", "σ": "sigma", "ζ": "zeta"}
    theory = (DOCS / "theory.md").read_text()
    for row in RATES:
        line = " | ".join(row)
        for sign, name in letters.items():
            line = line.replace(sign, name)
        assert f"| {line} |" in theory
