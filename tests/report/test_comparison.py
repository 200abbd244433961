"""Comparisons of runs: statistics over seeds, the cost of reaching a target, settings and tables."""

import csv
import statistics
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from keel import KeelError, Spec, make_spec
from keel.config.network import Network
from keel.core.randomness import keyed_rng
from keel.report.comparison import Comparison, compare
from keel.report.explanations import difference_notes, explanation
from keel.report.tables import change, costs, csv_of, csv_text, latex, markdown, results
from keel.report.target import Spent, cost
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder
from keel.units import size
from tests.conftest import Called, as_earlier_version


def environment(spec: Spec, **changes: object) -> dict[str, object]:
    """Return the environment of a run, as far as a comparison reads it."""
    task = {"examples_sha256": "e", "parameters": 1, "loss": "cross entropy"}
    return {"title": spec.algorithm.title, "engine": "serial", "workers": 1, **task, **changes}


def write_run(
    path: Path, curve: list[float], per_round: int, final: float | None, status: str = "finished", **table: object
) -> RunFolder:
    """Write a run folder with these accuracies, one per round."""
    spec = make_spec({"rounds": len(curve), **table})
    folder = RunFolder.create(path, spec, environment(spec))
    for t, accuracy in enumerate(curve, start=1):
        record = {"round": t, "cohort": [0], "bytes_down": per_round, "bytes_up": per_round, "accuracy": accuracy}
        folder.append(record, 0.1)
    folder.finish({"status": status, "accuracy": final})
    return folder


def algorithm(name: str, **settings: object) -> dict[str, object]:
    return {"algorithm": {"name": name, **settings}}


def test_mean_and_standard_deviation_agree_with_numpy(tmp_path: Path) -> None:
    finals = [0.81, 0.85, 0.79]
    for seed, final in enumerate(finals):
        write_run(tmp_path / str(seed), [0.5, final], 10, final, seed=seed, **algorithm("fedavg"))
    row = compare(find_runs([tmp_path])).rows()[0]
    assert row["accuracy_mean"] == pytest.approx(np.mean(finals))
    assert row["accuracy_std"] == pytest.approx(np.std(finals, ddof=1))
    assert row["seeds"] == 3


def test_rounds_and_bytes_count_until_the_final_accuracy_of_the_baseline(tmp_path: Path) -> None:
    slow = [t / 100 for t in range(1, 101)]
    fast = [min(1.0, t / 50) for t in range(1, 101)]
    write_run(tmp_path / "a", slow, 10, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / "b", fast, 15, 1.0, **algorithm("ghbm"))
    base, other = compare(find_runs([tmp_path])).rows()
    # the average of the last 20 rounds is that of round t - 9.5
    expected_slow = next(t for t in range(20, 101) if statistics.fmean(slow[t - 20 : t]) >= 0.5)
    expected_fast = next(t for t in range(20, 101) if statistics.fmean(fast[t - 20 : t]) >= 0.5)
    assert (base["rounds_to_target"], base["bytes_to_target"]) == (expected_slow, 20 * expected_slow)
    assert (other["rounds_to_target"], other["bytes_to_target"]) == (expected_fast, 30 * expected_fast)
    assert other["rounds_saved"] == pytest.approx(1 - expected_fast / expected_slow)
    assert other["bytes_saved"] == pytest.approx(1 - 30 * expected_fast / (20 * expected_slow))


def test_one_lucky_round_does_not_reach_the_target(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1] * 30 + [0.6] * 30, 1, 0.6, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.1] * 10 + [0.9] + [0.1] * 49, 1, 0.1, **algorithm("ghbm"))
    assert compare(find_runs([tmp_path])).rows()[1]["rounds_to_target"] is None


def test_a_lucky_first_evaluation_does_not_reach_the_target(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 60, 1, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.9] + [0.1] * 59, 1, 0.1, **algorithm("ghbm"))
    rows = compare(find_runs([tmp_path])).rows()
    assert [row["rounds_to_target"] for row in rows] == [20, None]


def test_two_runs_of_the_same_seed_count_once(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, [0.5], 1, 0.5, **algorithm("fedavg"))
    assert compare(find_runs([tmp_path])).rows()[0]["seeds"] == 1


def test_the_target_is_the_baseline_of_the_same_setting(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.9] * 40, 1, 0.9, data={"alpha": 0.0}, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.5] * 40, 1, 0.5, data={"alpha": 10.0}, **algorithm("fedavg"))
    write_run(tmp_path / "c", [0.6] * 40, 1, 0.6, data={"alpha": 10.0}, **algorithm("ghbm"))
    write_run(tmp_path / "d", [0.6] * 40, 1, 0.6, data={"alpha": 3.0}, **algorithm("ghbm"))
    rows = compare(find_runs([tmp_path])).rows()
    assert [row["target"] for row in rows] == [0.9, 0.5, 0.5, None]


def test_a_baseline_without_runs_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], 1, 0.5, **algorithm("ghbm"))
    with pytest.raises(KeelError, match=r"--target.*'fedagv'"):
        compare(find_runs([tmp_path]), "fedagv")


def test_reading_a_folder_imports_no_code_that_its_spec_names(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5], 1, 0.5, **algorithm("ghbm"))
    spec = as_earlier_version(folder.path) / "spec.toml"
    spec.write_text(spec.read_text().replace('name = "ghbm"', 'name = "antigravity:Surprise"'))
    assert compare(find_runs([tmp_path])).methods[0].algorithm == "antigravity:Surprise"
    assert "antigravity" not in sys.modules


def test_a_diverged_method_is_marked_and_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5, 0.6], 1, 0.6, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.2], 1, None, "diverged", **algorithm("ghbm"))
    rows = compare(find_runs([tmp_path])).rows()
    assert [row["status"] for row in rows] == ["finished", "diverged"]
    assert rows[1]["accuracy_mean"] is None


def test_labels_name_only_the_fields_that_distinguish_methods(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], 1, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.5], 1, 0.5, **algorithm("ghbm", tau=5))
    write_run(tmp_path / "c", [0.5], 1, 0.5, **algorithm("ghbm", tau=10))
    labels = [method.label for method in compare(find_runs([tmp_path])).methods]
    assert labels == ["FedAvg", "GHBM tau=5", "GHBM tau=10"]


def test_without_the_baseline_there_is_no_target(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], 1, 0.5, **algorithm("ghbm"))
    comparison = compare(find_runs([tmp_path]))
    assert comparison.targets == [None]
    assert "Rounds and bytes" not in explanation(comparison)


def test_runs_without_any_evaluation_are_an_error(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a", make_spec({}), environment(make_spec({})))
    with pytest.raises(KeelError, match="has no accuracy yet"):
        compare(find_runs([tmp_path]))


def test_runs_on_different_data_are_different_methods(tmp_path: Path) -> None:
    for name in "ab":
        spec = make_spec({"rounds": 1, **algorithm("fedavg")})
        folder = RunFolder.create(tmp_path / name, spec, environment(spec, examples_sha256=name))
        folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    assert len(compare(find_runs([tmp_path])).methods) == 2


def test_a_folder_that_a_kill_left_incomplete_is_not_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], 1, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / ".b", [0.5], 1, 0.5, **algorithm("ghbm"))
    assert [folder.path.name for folder in find_runs([tmp_path])] == ["a"]


def test_sizes_and_changes_are_formatted() -> None:
    assert [size(n) for n in (5, 5_000, 5_100_000, 5_200_000_000, None)] == ["5 B", "5.0 kB", "5.1 MB", "5.2 GB", "-"]
    assert [change(x) for x in (0.5, -0.25, None)] == ["↓ 50 %", "↑ 25 %", "-"]
    assert [change(x) for x in (0.0, -0.004)] == ["0 %", "0 %"]


def test_the_cost_agrees_with_the_example_in_the_paper() -> None:
    """The paper's table on cost, CIFAR-100 with the CNN: FedAvg 30.9 GB in 2:05 h; SCAFFOLD sends twice as much."""
    fedavg = Spent(rounds=20_000, bytes=round(30.9e9), seconds=125 * 60)
    budget = Spent(20_000, round(61.8e9), 125.8 * 60)
    scaffold = cost(Spent(13_200, round(0.66 * budget.bytes), 0.66 * budget.seconds), budget, fedavg)
    assert scaffold.share == pytest.approx(0.66)
    assert scaffold.bytes == pytest.approx(40.8e9, rel=1e-3)
    assert scaffold.bytes_saved == pytest.approx(-0.32, abs=1e-3)  # an increase by 32.0 %
    assert scaffold.seconds == pytest.approx(83 * 60, rel=1e-2)  # 01:23
    never = cost(None, Spent(10_000, round(30.9e9), 642 * 60), Spent(10_000, round(10.3e9), 216 * 60))
    assert (never.share, never.bytes_saved) == (1.0, pytest.approx(-2.0, abs=1e-2))  # MimeMom: 30.9 GB, up by 200 %
    assert cost(None, fedavg, fedavg).bytes_saved == 0.0


def test_both_tables_have_the_same_savings(tmp_path: Path) -> None:
    """The baseline is charged until it reaches its final accuracy, in the results and in the cost table alike."""
    write_run(tmp_path / "a", [t / 100 for t in range(1, 101)], 10, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / "b", [min(1.0, t / 50) for t in range(1, 101)], 15, 1.0, **algorithm("ghbm"))
    comparison = compare(find_runs([tmp_path]))
    for row in comparison.rows():
        assert row["rounds_to_target"] < 100
        assert row["cost"]["share"] == row["rounds_to_target"] / 100
        assert row["cost"]["bytes"] == row["bytes_to_target"]
        assert row["cost"]["bytes_saved"] == row["bytes_saved"]
    (table,), (cost_table,) = results(comparison), costs(comparison)
    for name in ("bytes", "Δ bytes"):
        column, cost_column = table.columns.index(name), cost_table.columns.index(name)
        assert [row[column] for row in table.rows] == [row[cost_column] for row in cost_table.rows]


def test_a_target_may_be_a_number(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [t / 100 for t in range(1, 101)], 10, 0.9, **algorithm("ghbm"))
    (row,) = compare(find_runs([tmp_path]), target=0.3).rows()
    assert row["rounds_to_target"] == 40  # the mean of rounds 21 to 40 is 0.305
    assert row["rounds_to_target_seeds"] == [40]


def test_the_difference_from_the_baseline_is_paired_over_common_seeds(tmp_path: Path) -> None:
    finals = {"fedavg": {0: 0.70, 1: 0.72, 2: 0.69}, "fedhbm": {1: 0.78, 2: 0.76, 3: 0.99}, "fedcm": {2: 0.5, 4: 0.5}}
    for name, seeds in finals.items():
        for seed, final in seeds.items():
            write_run(tmp_path / f"{name}-{seed}", [0.5, final], 10, final, seed=seed, **algorithm(name))
    rows = {row["algorithm"]: row for row in compare(find_runs([tmp_path])).rows()}
    found = rows["fedhbm"]["accuracy_difference"]
    assert (found["mean"], found["seeds"]) == (pytest.approx(0.065), 2)
    assert (found["low"], found["high"]) == pytest.approx((0.065 - 12.706 * 0.005, 0.065 + 12.706 * 0.005), rel=1e-3)
    assert "accuracy_difference" not in rows["fedavg"]
    assert "accuracy_difference" not in rows["fedcm"], "one seed in common"


def test_the_table_with_intervals_has_the_differences_from_the_baseline(tmp_path: Path) -> None:
    finals = {"fedavg": [0.70, 0.72, 0.69], "fedhbm": [0.76, 0.78, 0.76], "ghbm": [0.75]}
    for name, seeds in finals.items():
        for seed, final in enumerate(seeds):
            write_run(tmp_path / f"{name}-{seed}", [0.5, final], 10, final, seed=seed, **algorithm(name))
    comparison = compare(find_runs([tmp_path]))
    assert len(results(comparison)) == 1
    _, sheet = results(comparison, interval=True)
    half = 4.303 * np.std([0.06, 0.06, 0.07], ddof=1) / np.sqrt(3)
    interval = f"{100 * (0.19 / 3 - half):+.1f} to {100 * (0.19 / 3 + half):+.1f}"
    assert sheet.rows == [["FedHBM", "+6.3", interval, "3"]], "GHBM has one seed in common"
    assert sheet.title == "Accuracy minus that of FedAvg, paired by seed, in percentage points"
    assert "Differences: mean over common seeds" in explanation(comparison, interval=True)
    assert "Differences" not in explanation(comparison)
    assert "| FedHBM | +6.3 |" in comparison.to_markdown(interval=True)


def test_the_confidence_interval_is_by_students_t(tmp_path: Path) -> None:
    finals = [0.81, 0.85, 0.79]
    for seed, final in enumerate(finals):
        write_run(tmp_path / str(seed), [0.5, final], 10, final, seed=seed, **algorithm("fedavg"))
    row = compare(find_runs([tmp_path])).rows()[0]
    assert row["accuracy_interval"] == pytest.approx(4.303 * np.std(finals, ddof=1) / np.sqrt(3), rel=1e-3)


def test_wall_clock_time_is_estimated_for_a_network(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 30, 1_000_000, 0.5, **algorithm("fedavg"))
    network = Network(up_mbps=8, down_mbps=80, latency_ms=500, slowdown=10)
    (method,) = compare(find_runs([tmp_path]), network=network).methods
    seconds = 2 * 0.5 + 1 + 0.1 + 10 * 0.1  # latency twice, a megabyte up and down, ten times a tenth of a second
    assert method.seconds[-1] == pytest.approx(30 * seconds)
    slow = compare(find_runs([tmp_path]), network=network.model_copy(update={"straggle": 1.0})).methods[0]
    spread = [np.exp(keyed_rng(0, "network", t, 0).standard_normal()) for t in range(1, 31)]
    assert slow.seconds[-1] == pytest.approx(30 * (seconds - 1) + sum(spread))


@pytest.fixture
def three(tmp_path: Path) -> Comparison:
    for name, title, final in ("a", "fedavg", 0.5), ("b", "ghbm", 0.9), ("c", "fedhbm", 0.7):
        write_run(tmp_path / name, [final] * 30, 10, final, **algorithm(title))
    write_run(tmp_path / "d", [0.1] * 30, 10, None, status="diverged", **algorithm("fedcm"))
    return compare(find_runs([tmp_path]))


def test_the_best_is_bold_and_the_second_underlined(three: Comparison) -> None:
    text = markdown(results(three)[0])
    assert "| GHBM | **90.0 %** |" in text
    assert "| FedHBM | <u>70.0 %</u> |" in text
    assert "| FedAvg | 50.0 % |" in text
    assert "| FedCM | diverged | never |" in text
    tex = latex(results(three)[0])
    assert r"GHBM & \textbf{90.0 \%} &" in tex
    assert r"FedHBM & \underline{70.0 \%} &" in tex
    assert tex.startswith(r"\begin{tabular}{lrrrrr}")


def test_csv_has_every_number(three: Comparison) -> None:
    rows = list(csv.DictReader(csv_text(three).splitlines()))
    assert [row["algorithm"] for row in rows] == [row["algorithm"] for row in three.rows()]
    assert float(rows[1]["accuracy_mean"]) == three.rows()[1]["accuracy_mean"]
    assert float(rows[1]["cost_bytes"]) == three.rows()[1]["cost"]["bytes"]


def test_csv_has_a_dash_for_a_seed_that_never_reaches_the_target() -> None:
    assert csv_of([{"seeds": [3, None]}]) == "seeds\n3 -\n"


def test_the_baseline_reaches_its_own_final_accuracy_in_short_runs_too(tmp_path: Path) -> None:
    """The final accuracy is the mean of the last third, over at least as many rounds as the smoothing window."""
    for rounds in (12, 30, 60):
        curve = [0.1 + 0.7 * t / rounds for t in range(1, rounds + 1)]
        last = curve[-(rounds // 3) :]
        write_run(tmp_path / str(rounds), curve, 10, statistics.fmean(last), **algorithm("fedavg"))
        (row,) = compare(find_runs([tmp_path / str(rounds)])).rows()
        assert row["rounds_to_target"] == rounds


def test_a_method_that_diverged_costs_all_rounds_of_the_spec(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 100, 10, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.9] * 30, 30, None, status="diverged", rounds=100, **algorithm("mimemom"))
    _, row = compare(find_runs([tmp_path])).rows()
    assert row["rounds_to_target"] is None
    assert row["rounds_to_target_seeds"] == [None]
    assert row["cost"]["share"] == 1.0
    assert row["cost"]["bytes"] == 100 * 60
    assert row["cost"]["bytes_saved"] == pytest.approx(1 - 100 * 60 / (20 * 20))  # the baseline needs 20 rounds
    assert row["cost"]["seconds"] == pytest.approx(100 * 0.1)


def test_of_two_runs_of_the_same_seed_the_finished_one_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 2, 1, None, status="interrupted", **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.5] * 2, 1, 0.5, **algorithm("fedavg"))
    (row,) = compare(find_runs([tmp_path])).rows()
    assert row["status"] == "finished"


def test_savings_in_both_tables_agree_for_a_numeric_target(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [t / 100 for t in range(1, 101)], 10, 0.9, **algorithm("fedavg"))
    write_run(tmp_path / "b", [min(1.0, t / 50) for t in range(1, 101)], 10, 1.0, **algorithm("ghbm"))
    base, other = compare(find_runs([tmp_path]), target=0.4).rows()
    assert base["cost"]["share"] == base["rounds_to_target"] / 100
    assert base["cost"]["bytes_saved"] == 0
    assert other["cost"]["bytes_saved"] == pytest.approx(other["bytes_saved"])


def test_each_setting_is_a_table_and_its_fields_are_columns_of_the_csv(tmp_path: Path) -> None:
    for alpha in (0.0, 10.0):
        for name in ("fedavg", "ghbm"):
            write_run(tmp_path / f"{name}{alpha}", [0.5], 1, 0.5, data={"alpha": alpha}, **algorithm(name))
    comparison = compare(find_runs([tmp_path]))
    sheets = results(comparison)
    assert [sheet.title for sheet in sheets] == ["digits, mlp: data.alpha = 0.0", "digits, mlp: data.alpha = 10.0"]
    assert [[row[0] for row in sheet.rows] for sheet in sheets] == [["FedAvg", "GHBM"]] * 2
    assert markdown(sheets[1]).startswith("digits, mlp: data.alpha = 10.0\n\n| method |")
    assert r"\multicolumn{6}{l}{digits, mlp: data.alpha = 0.0} \\" in latex(sheets[0])
    rows = list(csv.DictReader(csv_text(comparison).splitlines()))
    assert sorted(row["data.alpha"] for row in rows) == ["0.0", "0.0", "10.0", "10.0"]
    assert comparison.rows()[0]["fields"] == {"data.alpha": 0.0}


@pytest.fixture
def tuned(tmp_path: Path) -> Comparison:
    """Three methods, one of which has another learning rate."""
    for name, lr in ("fedavg", 0.5), ("fedprox", 0.5), ("ghbm", 0.1):
        write_run(tmp_path / name, [0.5] * 3, 1, 0.5, local={"lr": lr}, server={"lr": 1.0}, **algorithm(name))
    return compare(find_runs([tmp_path]))


def test_fields_that_differ_between_methods_are_noted(tuned: Comparison) -> None:
    (setting,) = tuned.settings
    values = dict(zip(setting.labels, setting.differing["local.lr"], strict=True))
    assert values == {"FedAvg": 0.5, "FedProx": 0.5, "GHBM": 0.1}
    assert difference_notes(tuned) == ["local.lr differs: 0.5 (FedAvg, FedProx), 0.1 (GHBM)"]
    assert {row["label"]: row["differing"] for row in tuned.rows()} == {
        label: {"local.lr": lr} for label, lr in values.items()
    }
    assert {row["label"]: row["local.lr"] for row in csv.DictReader(csv_text(tuned).splitlines())} == {
        label: str(lr) for label, lr in values.items()
    }


def test_methods_with_equal_fields_have_no_note(three: Comparison) -> None:
    assert [note for note in difference_notes(three) if "participation" in note or "data" in note] == []


def test_fields_that_every_label_names_are_not_noted(tmp_path: Path) -> None:
    for name in ("fedavg", "ghbm"):
        for lr in (0.1, 0.2):
            write_run(
                tmp_path / f"{name}{lr}", [0.5] * 3, 1, 0.5, local={"lr": lr}, server={"lr": 1.0}, **algorithm(name)
            )
    comparison = compare(find_runs([tmp_path]))
    assert "FedAvg local.lr=0.1" in [method.label for method in comparison.methods]
    assert difference_notes(comparison) == []


def test_engines_with_the_same_arithmetic_are_one_method(tmp_path: Path) -> None:
    for seed, (asked, chosen) in enumerate([("auto", "pool"), ("serial", "serial"), ("pool", "pool")]):
        spec = make_spec({"rounds": 1, "seed": seed, "engine": {"name": asked, "workers": seed + 1}})
        folder = RunFolder.create(tmp_path / str(seed), spec, environment(spec, engine=chosen))
        folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    assert [row["seeds"] for row in compare(find_runs([tmp_path])).rows()] == [3]


def test_rounds_to_target_are_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 40, **algorithm("fedavg")})
    RunFolder.create(tmp_path / "0", spec, environment(spec))  # no round yet
    write_run(tmp_path / "1", [0.5] * 40, 1, 0.5, seed=1, **algorithm("fedavg"))
    (method,) = compare(find_runs([tmp_path])).methods
    assert dict(zip(method.seeds, method.reaches_by_seed(0.5), strict=True)) == {0: None, 1: method.window}
    assert method.status == "unfinished"


def write_rounds(path: Path, spec: Spec, **changes: object) -> RunFolder:
    """Write a run of one round whose environment has these values."""
    folder = RunFolder.create(path, spec, environment(spec, **changes))
    folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    return folder


def rename(folder: RunFolder, table: str, name: str) -> None:
    """Set a name in spec.toml that a spec could not be made with here."""
    file = as_earlier_version(folder.path) / "spec.toml"
    spec = tomllib.loads(file.read_text())
    spec[table]["sampler" if table == "participation" else "name"] = name
    file.write_text(tomli_w.dumps(spec))


def test_algorithms_that_cannot_be_imported_differ_by_title_and_class(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 1, **algorithm("fedavg")})
    recorded = [
        {"title": "Old"},  # of a version that recorded no class
        {"title": "Other"},
        {"title": "User", "algorithm_class": "__main__.A"},
        {"title": "User", "algorithm_class": "__main__.B"},
    ]
    for number, changes in enumerate(recorded):
        rename(write_rounds(tmp_path / str(number), spec, **changes), "algorithm", "custom")
    labels = [method.label for method in compare(find_runs([tmp_path])).methods]
    assert labels == ["Old", "Other", "User class=__main__.A", "User class=__main__.B"]


def test_old_and_new_runs_of_a_named_algorithm_are_one_method(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 1, **algorithm("fedavg")})
    write_rounds(tmp_path / "0", spec)
    changes = {"algorithm_class": "keel.algorithms.fedavg.FedAvg", "sampler": None, "bit_identical": True}
    write_rounds(tmp_path / "1", make_spec({"rounds": 1, "seed": 1, **algorithm("fedavg")}), **changes)
    assert [row["seeds"] for row in compare(find_runs([tmp_path])).rows()] == [2]


def test_runs_with_different_samplers_are_not_comparable(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 1, **algorithm("fedavg")})
    for number, sampler in enumerate(["Mornings()", "Evenings()"]):
        rename(write_rounds(tmp_path / str(number), spec, sampler=sampler), "participation", "custom")
    comparison = compare(find_runs([tmp_path]))
    assert [setting.fields for setting in comparison.settings] == [
        {"participation.sampler": "Mornings()"},
        {"participation.sampler": "Evenings()"},
    ]


@pytest.mark.parametrize("engine", ["theirs", "antigravity:factory"])
def test_a_run_of_a_users_engine_has_a_report_without_that_engine(
    tmp_path: Path, engine: str, keel: Callable[..., Called]
) -> None:
    for seed, changes in enumerate([{}, {"bit_identical": True}, {"bit_identical": False}]):
        spec = make_spec({"rounds": 1, "seed": seed, **algorithm("fedavg")})
        rename(write_rounds(tmp_path / "runs" / str(seed), spec, engine=engine, **changes), "engine", engine)
    write_rounds(tmp_path / "runs" / "serial", make_spec({"rounds": 1, "seed": 3, **algorithm("fedavg")}))
    comparison = compare(find_runs([tmp_path / "runs"]), network=Network(up_mbps=1.0))
    assert [method.seeds for method in comparison.methods] == [[0, 2], [1, 3]]
    called = keel("report", tmp_path / "runs", "--network", "up_mbps=1.0")
    assert called.code == 0, called.err
    assert "antigravity" not in sys.modules
