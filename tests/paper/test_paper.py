"""Every table and figure of the paper by name: listed, priced, run at smoke scale, rendered."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.algorithms import REGISTRY
from keel.errors import KeelError
from keel.paper.price import listing, listing_lines, priced, priced_sheets
from keel.paper.printed import tables
from keel.paper.recipes import SCALES, find, items, seconds_of
from keel.paper.references import GRIDS, RATES
from keel.paper.results import _deviation, make
from keel.paper.running import Shelf, left, run_parts, wanted
from keel.paper.views import figure_of, view
from keel.runs.folder import RunFolder
from keel.runs.spec import make_spec
from tests.conftest import Called

Keel = Callable[..., Called]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all names share, so that no run is made twice."""
    out = tmp_path_factory.mktemp("paper")
    run_parts([part for item in items().values() for part in item.smoke], out, quiet=True)
    return out


@pytest.mark.parametrize("name", items())
def test_every_table_and_figure_runs_at_smoke_scale(name: str, shelf: Path, keel: Keel) -> None:
    called = keel("paper", "run", name, "--scale", "smoke", "--out", shelf, "-q")
    assert called.code == 0, called.err
    item = find(name)
    assert item.title in called.out
    files = {file.name: file for file in (shelf / f"{name}-smoke").iterdir()}
    expected = {"result.json", "table.txt", "table.md", "table.tex", "table.csv"}
    assert set(files) == expected | ({"figure.html", "figure.svg", "figure.png"} if item.kind == "figure" else set())
    assert "not run" not in called.out
    assert len(files["table.csv"].read_text().splitlines()) > 1
    assert files["table.tex"].read_text().count(r"\begin{tabular}") == len(
        view(json.loads(files["result.json"].read_text())).sheets
    )
    assert files["table.tex"].read_text().isascii()
    if item.kind == "figure":
        assert files["figure.svg"].read_text().startswith("<svg")
        assert files["figure.png"].read_bytes().startswith(b"\x89PNG")
        assert 'src="http' not in files["figure.html"].read_text()


def test_the_list_tells_what_is_there_and_what_is_missing(
    shelf: Path, keel: Keel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(shelf / "no data"))
    rows = json.loads(keel("paper", "list", "--out", shelf, "--json").out)
    assert [row["name"] for row in rows] == list(items())
    for row in rows:
        assert row["scales"]["smoke"]["there"] == row["scales"]["smoke"]["runs"]
        assert row["scales"]["smoke"]["missing"] == []
    large = next(row for row in rows if row["name"] == "large-scale")["scales"]["paper"]
    assert large["runs"] == 8 * 6 * 5
    assert [line.split("'")[1] for line in large["missing"]] == ["landmarks", "inaturalist", "stackoverflow"]
    text = keel("paper", "list", "--out", shelf).out
    assert "Table 2: final accuracy of every method" in text
    assert "Missing: data.name: 'landmarks' needs" in text


def test_every_recipe_can_be_made_at_every_scale_without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    for item in items().values():
        for scale in SCALES:
            for part in item.parts(scale):
                asked = wanted(part, Shelf(tmp_path))
                assert all(asked.specs.values())
                if scale == "paper":
                    assert part.seeds == 5 or not part.methods


def test_the_paper_scale_is_the_printed_protocol() -> None:
    [spec, *_] = find("controlled").paper[0].specs("fedhbm")
    assert (spec.rounds, spec.evaluation.last, spec.data.alpha, spec.participation.rate) == (10000, 100, 0.0, 0.1)
    for name in ("controlled", "controlled-cifar10", "large-scale", "cost"):
        for part in find(name).paper:
            assert all(spec.evaluation.last == 100 for spec in part.specs("fedavg"))
    for column, (_, data, model) in GRIDS.items():
        best = tables()["hyperparameters"][column]
        for method, fields in best.items():
            if method != "all":
                spec = make_spec({"data": {"name": data}, "model": {"name": model}, "algorithm": {"name": method}})
                for name, value in {**best["all"], **fields}.items():
                    table, field = name.split(".")
                    ours = getattr(getattr(spec, table), field)
                    if ours == "period":
                        ours = round(1 / spec.participation.rate)
                    assert ours == value, (column, method, name)


def test_a_round_of_centralized_training_is_an_epoch() -> None:
    parts = [part for scale in SCALES for part in find("centralized").parts(scale)]
    specs = [spec for part in parts for spec in part.specs("centralized")]
    assert {spec.data.name for spec in specs} >= {"cifar10", "cifar100", "shakespeare", "stackoverflow", "landmarks"}
    assert all((spec.local.epochs, spec.local.steps) == (1, None) for spec in specs)
    asked = [make_spec({"rounds": 1, "algorithm": {"name": name}}) for name in ("fedavg", "centralized")]
    federated, centralized = map(seconds_of, asked)
    assert centralized == pytest.approx(20 * federated)  # which has a tenth of the clients, on two cores


def test_clients_of_different_sizes_are_not_weighted_at_the_papers_scale() -> None:
    for part in find("large-scale").paper:
        assert all(spec.server.weighting == "uniform" for spec in part.specs("fedavg"))


def test_searches_have_seeds_of_their_own_and_the_table_says_so() -> None:
    for item in items().values():
        for part in (part for scale in SCALES for part in item.parts(scale) if part.grid):
            for method in part.methods:
                plan = part.plan(method)
                assert plan is not None
                assert not set(plan.seeds) & {spec.seed for spec in part.specs(method)}
            assert f"the grid '{part.grid}'" in part.how_tuned()
            assert "seeds 100 and 101" in part.how_tuned()
            assert ("non-IID setting, not anew" in part.how_tuned()) == bool(part.search)


def test_searches_are_priced_and_what_nobody_has_measured_makes_it_at_least(tmp_path: Path) -> None:
    rows = {row["name"]: row["scales"] for row in listing(tmp_path)}
    smoke = rows["mnist"]["smoke"]
    assert (smoke["runs"], smoke["searched"], smoke["rounds"]) == (1, 16, 17 * 6)
    assert smoke["seconds"] == pytest.approx(17 * 6 * 0.01)
    curves = rows["curves"]["paper"]
    assert curves["unmeasured"] == 6 * 5  # of Stack Overflow
    assert curves["seconds"] == pytest.approx(2 * 10 * 5 * 10_000 * 11)
    mnist = rows["mnist"]["desktop"]
    assert mnist["searched"] == 20 * 8 * 2  # for both of its parts
    assert mnist["rounds"] == 200 * 200 + mnist["searched"] * 100
    lines = [line for _, line in listing_lines(listing(tmp_path), tmp_path)]
    assert any(line.startswith("paper: 0 of 130 runs, at least") for line in lines)


def test_models_that_the_paper_has_pretrained_are() -> None:
    for part in [*find("large-scale").paper, *find("cost").paper, *find("centralized").paper]:
        spec = part.specs(part.methods[0])[0]
        own = spec.model.model_dump()
        assert bool(own.get("pretrained")) == (spec.data.name in ("landmarks", "inaturalist")), part.title


def test_guesses_are_marked(tmp_path: Path) -> None:
    [sheet] = view(make(find("controlled-cifar10"), "paper", Shelf(tmp_path))).sheets
    assert sheet.columns[1:3] == ["CIFAR-10, ResNet-20, non-IID", "paper"]
    marked = {row[0] for row in sheet.rows if row[1].endswith(" †")}
    assert {"AdaBest", "FedADC", "LocalGHBM tau_i=actual"} <= marked
    assert {"FedAvg", "FedHBM tau_i=actual"} & marked == set()
    [large] = view(make(find("large-scale"), "paper", Shelf(tmp_path))).sheets
    ghbm = dict(zip(large.columns, next(row for row in large.rows if row[0] == "GHBM"), strict=True))
    assert ghbm["GLDv2, MobileNetV2, C = 0.79 %"] == "not run †"
    assert ghbm["Stack Overflow, C = 0.12 %"] == "not run"


def test_what_is_missing_is_told_with_the_options_that_find_it(tmp_path: Path) -> None:
    result = make(find("alpha"), "smoke", Shelf(tmp_path), seeds=3)
    assert result["command"] == "keel paper run alpha --scale smoke --seeds 3"
    told = view(result, " --out elsewhere").notes[-1]
    assert told == "12 runs not there yet: keel paper run alpha --scale smoke --seeds 3 --out elsewhere"


def test_a_label_has_its_fraction(tmp_path: Path) -> None:
    rows = make(find("theory"), "paper", Shelf(tmp_path))["parts"][0]["rows"]
    assert [row["label"] for row in rows] == ["GHBM", "GHBM (theory) lr=0.1 server.lr=0.8 beta=0.1"]


def test_a_number_of_the_papers_is_a_name() -> None:
    assert find("Table 2") is find("table 2") is find("controlled")
    with pytest.raises(KeelError, match="'Table 20' is not known"):
        find("Table 20")


def test_what_was_chosen_at_the_edge_of_a_grid_is_told(shelf: Path) -> None:
    result = make(find("mnist"), "smoke", Shelf(shelf))
    [row] = result["parts"][0]["rows"]
    at_edge = row["chosen"]["local.lr"] in (0.01, 0.3)
    assert row["at_the_edge"] == (["local.lr"] if at_edge else [])
    row |= {"at_the_edge": ["local.lr"], "chosen": {"local.lr": 0.3}}
    assert any(
        "edge of the grid, beyond which it may do better: FedHBM (lr 0.3)" in line for line in view(result).notes
    )


def test_a_dry_run_says_how_it_would_be_run(tmp_path: Path) -> None:
    told: list[str] = []
    [sheet] = priced_sheets(priced(find("theory").smoke, tmp_path, None, told.append))
    assert told == [f"digits, alpha = 0, 6 rounds: {method}" for method in ("ghbm", "ghbm_theory")]
    assert "rounds 6, data.clients 100, participation.rate 0.1, local.epochs 2, local.batch 8" in sheet.title
    assert sheet.rows[0][-1] == "local.lr 0.5, server.lr 1.0, beta 0.9, tau period"


def test_the_printed_numbers_are_of_methods_that_the_recipes_run() -> None:
    for item in items().values():
        if item.view in ("accuracy", "cost"):
            for part in item.paper:
                theirs = tables()[item.view].get(part.printed, {})
                assert set(theirs) == {method.split()[0] for method in part.methods}, (item.name, part.title)


def test_every_means_every_algorithm() -> None:
    assert set(find("digits").desktop[0].methods) == set(REGISTRY) - {"centralized"}


def test_what_is_not_in_the_paper_has_no_paper_scale(keel: Keel) -> None:
    called = keel("paper", "run", "digits", "--scale", "paper")
    assert called.code == 2
    assert called.err == "keel: --scale: digits is not in the paper; accepted: desktop, smoke\n"
    assert "did you mean 'tau'?" in keel("paper", "run", "taus").err


def test_missing_data_are_one_line_and_nothing_is_written(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "none"))
    called = keel("paper", "run", "large-scale", "--scale", "paper", "--out", tmp_path / "out")
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith("keel: data.name: 'landmarks' needs")
    assert not (tmp_path / "out").exists()


def test_the_price_of_what_is_missing_and_of_data_that_are_not_there(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "none"))
    called = keel("paper", "run", "tau", "--out", tmp_path / "out", "--dry-run", "--seeds", "2")
    assert called.code == 0, called.err
    assert "8 runs: about" in called.out
    assert not (tmp_path / "out").exists()
    rows = json.loads(keel("paper", "run", "centralized", "--scale", "paper", "--dry-run", "--json").out)
    assert all("missing" in row and row["rounds"] for row in rows)


def test_runs_that_ended_count_whoever_made_them_and_are_found_by_what_they_are(shelf: Path) -> None:
    part = find("curves").smoke[0]
    specs = part.specs("fedavg")
    folder = Shelf(shelf).find(specs[0])
    assert folder is not None
    known = json.loads((folder.path / "environment.json").read_text())
    (folder.path / "environment.json").write_text(json.dumps({**known, "source_sha256": "another"}))
    assert left(specs, Shelf(shelf)) == []
    assert left(part.specs("fedavg", seeds=2), Shelf(shelf)) == part.specs("fedavg", seeds=2)[1:]
    (folder.path / "environment.json").write_text(json.dumps(known))


def test_what_has_not_been_run_is_said_to_be_so(tmp_path: Path, shelf: Path) -> None:
    result = make(find("controlled"), "smoke", Shelf(tmp_path))
    cells = [cell for row in view(result).sheets[0].rows for cell in row]
    assert "not run" in cells
    assert view(result).notes[-1] == "7 runs not there yet: keel paper run controlled --scale smoke"
    some = make(find("controlled"), "smoke", Shelf(shelf), seeds=2)
    assert some["parts"][0]["rows"][0]["runs"] == 1
    assert "(1 of 2 seeds)" in view(some).sheets[0].rows[0][1]


def test_a_result_has_the_spec_the_surroundings_and_the_command(shelf: Path) -> None:
    result = make(find("mnist"), "smoke", Shelf(shelf))
    [part] = result["parts"]
    [row] = part["rows"]
    assert result["command"] == "keel paper run mnist --scale smoke"
    assert part["spec"]["data.name"] == "digits"
    assert {"keel", "torch", "source_sha256"} <= set(part["environments"][0])
    assert set(row["chosen"]) == {"local.lr", "algorithm.beta"}
    runs = [RunFolder.open(path.parent) for path in (shelf / "runs").glob("*fedhbm*/spec.toml")]
    assert any(folder.table["local"]["lr"] == row["chosen"]["local.lr"] for folder in runs)


def test_a_field_on_the_axis_makes_columns_and_every_method_one_row(shelf: Path) -> None:
    shown = view(make(find("alpha"), "smoke", Shelf(shelf)))
    [sheet] = shown.sheets
    assert sheet.columns == ["alpha", "0", "10000"]
    assert [row[0] for row in sheet.rows] == ["FedAvg", "FedHBM"]
    assert all(cell.endswith("%") for row in sheet.rows for cell in row[1:])
    assert shown.figure is not None
    [panel] = shown.figure["concat"]
    assert [(p["method"], p["x"]) for p in panel["data"]["values"]] == [
        (method, x) for method in ("FedAvg", "FedHBM") for x in ("0", "10000")
    ]


def test_seeds_of_different_tasks_are_refused_by_name(shelf: Path, tmp_path: Path) -> None:
    part = find("curves").smoke[0]
    run_parts([part.model_copy(update={"methods": ["fedavg"]})], tmp_path, seeds=2, quiet=True)
    folder = Shelf(tmp_path).find(part.specs("fedavg", seeds=2)[1])
    assert folder is not None
    known = json.loads((folder.path / "environment.json").read_text())
    (folder.path / "environment.json").write_text(json.dumps({**known, "examples_sha256": "others"}))
    with pytest.raises(KeelError, match=f"the seeds of FedAvg are not of one task: .*{folder.path.name}"):
        make(find("curves"), "smoke", Shelf(tmp_path), seeds=2)


def test_a_search_that_diverged_throughout_is_found_by_its_own_setting_alone(tmp_path: Path) -> None:
    part = find("mnist").smoke[0]
    plan = part.plan("fedhbm")
    assert plan is not None
    rows = [{"fields": point, "best": False} for point in plan.points()]
    path = Shelf(tmp_path).sweep(plan)
    path.mkdir(parents=True)
    told = {**plan.described(), "base": plan.base.experiment, "points": rows}
    (path / "sweep.json").write_text(json.dumps(told))
    assert Shelf(tmp_path).point(plan) == plan.points()[0]
    other = part.model_copy(update={"spec": {**part.spec, "rounds": 7}}).plan("fedhbm")
    assert other is not None
    assert Shelf(tmp_path).point(other) is None


def test_deviations_are_of_rounds_that_every_run_has() -> None:
    def folder(rounds: int) -> Any:
        told = [{"1": 4.0 / t, "3": 1.0} if t >= 3 else {"1": 4.0 / t} for t in range(1, rounds + 1)]
        return SimpleNamespace(records=lambda: [{"round": t, "deviation": d} for t, d in enumerate(told, start=1)])

    for folders in ([folder(8), folder(4)], [folder(4), folder(8)]):  # one of them diverged
        found = _deviation(folders)
        assert found["1"]["rounds"] == [1, 2, 3, 4]
        assert found["1"]["second_half"] == pytest.approx((4 / 3 + 1) / 2)
        assert found["3"]["rounds"] == [3, 4]


def test_the_numbers_of_a_figure_are_in_its_csv(shelf: Path) -> None:
    deviation = view(make(find("deviation"), "smoke", Shelf(shelf)))
    shown = [[f"{record[f'deviation_tau_{tau}']:.2f}" for record in deviation.records] for tau in (1, 3)]
    assert [row[1:] for row in deviation.sheets[0].rows] == shown
    regression = view(make(find("regression"), "smoke", Shelf(shelf)))
    assert "mean nothing" in regression.notes[1]
    for row, record in zip(regression.sheets[0].rows, regression.records, strict=True):
        assert row[1:] == [f"{value:.1e}" for name, value in record.items() if name != "method"]


def test_a_method_looks_the_same_in_all_panels() -> None:
    def panel(*labels: str) -> dict[str, Any]:
        return {"title": "", "form": "accuracy", "labels": list(labels), "rows": []}

    first, second = figure_of([panel("FedAvg", "GHBM"), panel("GHBM", "FedHBM")], "")["concat"]
    for channel in ("color", "strokeDash"):
        scales = [panel["layer"][1]["encoding"][channel]["scale"] for panel in (first, second)]
        one, other = (dict(zip(scale["domain"], map(str, scale["range"]), strict=True)) for scale in scales)
        assert one["GHBM"] == other["GHBM"]
        assert other["FedHBM"] not in one.values()


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, keel: Keel) -> None:
    (tmp_path / "runs" / "odd").mkdir(parents=True)
    (tmp_path / "runs" / "odd" / "spec.toml").write_text("rounds = 3\n")
    called = keel("paper", "run", "tau", "--scale", "smoke", "--out", tmp_path)
    assert called.code == 2
    assert called.err.startswith(f"keel: '{tmp_path}/runs/odd/spec.toml': ")


def test_at_the_papers_scale_tau_i_is_that_of_participation() -> None:
    for item in items().values():
        for part in item.paper:
            for spec in (part.specs(method)[0] for method in part.methods):
                assert getattr(spec.algorithm, "tau_i", "actual") == "actual", item.name


def test_costs_have_the_papers_beside_them(shelf: Path) -> None:
    sheet = view(make(find("cost"), "smoke", Shelf(shelf))).sheets[0]
    columns = ["method", "a round", "share of rounds", "bytes", "Δ bytes", "paper: bytes", "paper: time"]
    assert sheet.columns == columns
    rows = {row[0]: row for row in sheet.rows}
    assert rows["FedHBM"][5:] == ["5.2 GB ↓ 83.0 %", "00:22 ↓ 82.0 %"]
    assert rows["SCAFFOLD"][5:] == ["40.8 GB ↑ 32.0 %", "01:23 ↓ 34.0 %"]
    assert rows["FedAvg"][1:3] == ["1x", "1.00"]
    assert [rows[name][1] for name in ("FedHBM", "GHBM", "SCAFFOLD")] == ["1x", "1.5x", "2x"]


def test_who_never_gets_there_is_told(shelf: Path) -> None:
    result = make(find("cost"), "smoke", Shelf(shelf))
    for row in result["parts"][0]["rows"]:
        row["rounds_to_target"] = None
    shown = {row[0]: row[2] for row in view(result).sheets[0].rows}
    assert (shown["FedAvg"], shown["FedHBM"]) == ("1.00", "never")


def test_times_are_shown_and_ranked_where_runs_take_a_minute(shelf: Path) -> None:
    result = make(find("cost"), "smoke", Shelf(shelf))
    assert any("Times are left out" in note for note in view(result).notes)
    for row in result["parts"][0]["rows"]:
        row["cost"] |= {"seconds": 60.0 * row["cost"]["share"]}
    sheet = view(result).sheets[0]
    assert sheet.columns[6:8] == ["time", "Δ time"]
    assert (0, 6) in sheet.places
    assert not any("Times are left out" in note for note in view(result).notes)


def test_the_papers_numbers_are_as_printed(tmp_path: Path) -> None:
    shown = view(make(find("large-scale"), "paper", Shelf(tmp_path)))
    fedavg, scaffold = shown.sheets[0].rows[:2]
    at = shown.sheets[0].columns.index("iNaturalist, MobileNetV2, C = 0.5 %") + 1
    assert shown.sheets[0].columns[at] == "paper"
    assert (fedavg[at], scaffold[at]) == ("45.25 ± 0.1 %", "diverged")
    records = {(r["part"], r["method"]): r for r in shown.records}
    assert records["iNaturalist, MobileNetV2, C = 0.5 %", "fedavg"]["paper_mean"] == "45.25"
    assert records["iNaturalist, MobileNetV2, C = 0.5 %", "scaffold"]["paper_mean"] == "diverged"


def test_the_documents_have_the_same_names_and_rates() -> None:
    docs = Path(__file__).parents[2] / "docs"
    listed = (docs / "paper.md").read_text().partition("| name | in the paper | shows |\n|---|---|---|\n")[2]
    names = listed.partition("\n\n")[0].splitlines()
    assert names == [f"| `{i.name}` | {i.number or 'not in it'} | {i.shows} |" for i in items().values()]
    letters = {"Δ": "Delta", "σ²": "sigma^2", "ζ²": "zeta^2", "σ": "sigma", "ζ": "zeta"}
    theory = (docs / "theory.md").read_text()
    for row in RATES:
        line = " | ".join(row)
        for sign, name in letters.items():
            line = line.replace(sign, name)
        assert f"| {line} |" in theory


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeelError, match="not known"):
        find("nothing")
