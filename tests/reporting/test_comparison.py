import csv
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from keel import KeelError, Spec, make_spec
from keel.network import Network
from keel.randomness import draws
from keel.reporting.comparison import Comparison, Spent, compare, cost
from keel.reporting.page import write_report
from keel.reporting.tables import change, csv_of, csv_text, explanation, latex, markdown, results
from keel.runs.batch import read_runs
from keel.runs.folder import RunFolder
from keel.units import size


def known(spec: Spec, **changes: object) -> dict[str, object]:
    """What a run knows of its surroundings, as far as a comparison reads it."""
    task = {"examples_sha256": "e", "parameters": 1, "loss": "cross entropy"}
    return {"title": spec.algorithm.title, "engine": "serial", "workers": 1, **task, **changes}


def made_up(
    path: Path, curve: list[float], per_round: int, final: float | None, status: str = "finished", **table: object
) -> RunFolder:
    """A run folder with these accuracies, one per round."""
    spec = make_spec({"rounds": len(curve), **table})
    folder = RunFolder.create(path, spec, known(spec))
    for t, accuracy in enumerate(curve, start=1):
        record = {"round": t, "cohort": [0], "bytes_down": per_round, "bytes_up": per_round, "accuracy": accuracy}
        folder.append(record, 0.1)
    folder.finish({"status": status, "accuracy": final})
    return folder


def algorithm(name: str, **settings: object) -> dict[str, object]:
    return {"algorithm": {"name": name, **settings}}


def test_statistics_are_those_of_numpy(tmp_path: Path) -> None:
    finals = [0.81, 0.85, 0.79]
    for seed, final in enumerate(finals):
        made_up(tmp_path / str(seed), [0.5, final], 10, final, seed=seed, **algorithm("fedavg"))
    row = compare(read_runs([tmp_path])).rows()[0]
    assert row["accuracy_mean"] == pytest.approx(np.mean(finals))
    assert row["accuracy_std"] == pytest.approx(np.std(finals, ddof=1))
    assert row["seeds"] == 3


def test_rounds_and_bytes_to_the_baselines_final_accuracy(tmp_path: Path) -> None:
    slow = [t / 100 for t in range(1, 101)]
    fast = [min(1.0, t / 50) for t in range(1, 101)]
    made_up(tmp_path / "a", slow, 10, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / "b", fast, 15, 1.0, **algorithm("ghbm"))
    base, other = compare(read_runs([tmp_path])).rows()
    # the average of the last 20 rounds is that of round t - 9.5
    expected_slow = next(t for t in range(20, 101) if statistics.fmean(slow[t - 20 : t]) >= 0.5)
    expected_fast = next(t for t in range(20, 101) if statistics.fmean(fast[t - 20 : t]) >= 0.5)
    assert (base["rounds_to_target"], base["bytes_to_target"]) == (expected_slow, 20 * expected_slow)
    assert (other["rounds_to_target"], other["bytes_to_target"]) == (expected_fast, 30 * expected_fast)
    assert other["rounds_saved"] == pytest.approx(1 - expected_fast / expected_slow)
    assert other["bytes_saved"] == pytest.approx(1 - 30 * expected_fast / (20 * expected_slow))


def test_a_lucky_round_does_not_count(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.1] * 30 + [0.6] * 30, 1, 0.6, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.1] * 10 + [0.9] + [0.1] * 49, 1, 0.1, **algorithm("ghbm"))
    assert compare(read_runs([tmp_path])).rows()[1]["rounds_to_target"] is None


def test_a_lucky_first_evaluation_does_not_count_either(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5] * 60, 1, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.9] + [0.1] * 59, 1, 0.1, **algorithm("ghbm"))
    rows = compare(read_runs([tmp_path])).rows()
    assert [row["rounds_to_target"] for row in rows] == [20, None]


def test_a_run_that_was_made_twice_counts_once(tmp_path: Path) -> None:
    for name in "ab":
        made_up(tmp_path / name, [0.5], 1, 0.5, **algorithm("fedavg"))
    assert compare(read_runs([tmp_path])).rows()[0]["seeds"] == 1


def test_methods_are_measured_against_the_baseline_of_their_own_setting(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.9] * 40, 1, 0.9, data={"alpha": 0.0}, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.5] * 40, 1, 0.5, data={"alpha": 10.0}, **algorithm("fedavg"))
    made_up(tmp_path / "c", [0.6] * 40, 1, 0.6, data={"alpha": 10.0}, **algorithm("ghbm"))
    made_up(tmp_path / "d", [0.6] * 40, 1, 0.6, data={"alpha": 3.0}, **algorithm("ghbm"))
    rows = compare(read_runs([tmp_path])).rows()
    assert [row["target"] for row in rows] == [0.9, 0.5, 0.5, None]


def test_a_baseline_that_is_not_there_is_refused(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5], 1, 0.5, **algorithm("ghbm"))
    with pytest.raises(KeelError, match="--target: 'fedagv' is not known"):
        compare(read_runs([tmp_path]), "fedagv")


def test_looking_at_a_folder_runs_no_code_that_it_names(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "a", [0.5], 1, 0.5, **algorithm("ghbm"))
    spec = folder.path / "spec.toml"
    spec.write_text(spec.read_text().replace('name = "ghbm"', 'name = "antigravity:Surprise"'))
    assert compare(read_runs([tmp_path])).methods[0].algorithm == "antigravity:Surprise"
    assert "antigravity" not in sys.modules


def test_a_diverged_method_is_marked_and_does_not_hide_the_others(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5, 0.6], 1, 0.6, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.2], 1, None, "diverged", **algorithm("ghbm"))
    rows = compare(read_runs([tmp_path])).rows()
    assert [row["status"] for row in rows] == ["finished", "diverged"]
    assert rows[1]["accuracy_mean"] is None


def test_labels_tell_settings_apart_only_where_they_must(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5], 1, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.5], 1, 0.5, **algorithm("ghbm", tau=5))
    made_up(tmp_path / "c", [0.5], 1, 0.5, **algorithm("ghbm", tau=10))
    labels = [method.label for method in compare(read_runs([tmp_path])).methods]
    assert labels == ["FedAvg", "GHBM tau=5", "GHBM tau=10"]


def test_without_the_baseline_there_is_no_target(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5], 1, 0.5, **algorithm("ghbm"))
    comparison = compare(read_runs([tmp_path]))
    assert comparison.targets == [None]
    assert "Rounds and bytes" not in explanation(comparison)


def test_runs_without_an_evaluation_alone_are_said_to_be_so(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a", make_spec({}), known(make_spec({})))
    with pytest.raises(KeelError, match="has no accuracy yet"):
        compare(read_runs([tmp_path]))


def test_a_run_that_diverged_before_its_first_evaluation_does_not_hide_the_others(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5] * 40, 1, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.6] * 40, 1, 0.6, **algorithm("ghbm"))
    spec = make_spec({"rounds": 40, "seed": 1, **algorithm("ghbm")})
    RunFolder.create(tmp_path / "c", spec, known(spec)).finish({"status": "diverged", "accuracy": None})
    comparison = compare(read_runs([tmp_path]))
    assert [row["status"] for row in comparison.rows()] == ["finished", "diverged"]
    assert comparison.rows()[1]["rounds_to_target"] is None
    write_report(comparison, tmp_path / "report.html")


def test_runs_on_different_data_are_different_methods(tmp_path: Path) -> None:
    for name in "ab":
        spec = make_spec({"rounds": 1, **algorithm("fedavg")})
        folder = RunFolder.create(tmp_path / name, spec, known(spec, examples_sha256=name))
        folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    assert len(compare(read_runs([tmp_path])).methods) == 2


def test_what_a_kill_left_half_made_is_not_a_run(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5], 1, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / ".b", [0.5], 1, 0.5, **algorithm("ghbm"))
    assert [folder.path.name for folder in read_runs([tmp_path])] == ["a"]


def test_numbers_as_people_read_them() -> None:
    assert [size(n) for n in (5, 5_000, 5_100_000, 5_200_000_000, None)] == ["5 B", "5.0 kB", "5.1 MB", "5.2 GB", "-"]
    assert [change(x) for x in (0.5, -0.25, None)] == ["↓ 50 %", "↑ 25 %", "-"]
    assert [change(x) for x in (0.0, -0.004)] == ["0 %", "0 %"]


def test_the_cost_is_that_of_the_papers_own_example() -> None:
    """Its table on cost, CIFAR-100 with the CNN: FedAvg 30.9 GB in 2:05 h; SCAFFOLD sends twice as much a round."""
    whole = Spent(rounds=20_000, bytes=round(30.9e9), seconds=125 * 60)
    scaffold = cost(13_200, Spent(20_000, round(61.8e9), 125.8 * 60), whole)
    assert scaffold.share == pytest.approx(0.66)
    assert scaffold.bytes == pytest.approx(40.8e9, rel=1e-3)
    assert scaffold.bytes_saved == pytest.approx(-0.32, abs=1e-3)  # an increase by 32.0 %
    assert scaffold.seconds == pytest.approx(83 * 60, rel=1e-2)  # 01:23
    never = cost(None, Spent(10_000, round(30.9e9), 642 * 60), Spent(10_000, round(10.3e9), 216 * 60))
    assert (never.share, never.bytes_saved) == (1.0, pytest.approx(-2.0, abs=1e-2))  # MimeMom: 30.9 GB, up by 200 %
    assert cost(None, whole, whole).bytes_saved == 0.0


def test_costs_are_in_the_rows(tmp_path: Path) -> None:
    slow = [t / 100 for t in range(1, 101)]
    made_up(tmp_path / "a", slow, 10, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / "b", [min(1.0, t / 50) for t in range(1, 101)], 15, 1.0, **algorithm("ghbm"))
    base, other = compare(read_runs([tmp_path])).rows()
    assert base["cost"]["share"] == 1.0
    assert other["cost"]["share"] == other["rounds_to_target"] / 100
    assert other["cost"]["bytes"] == pytest.approx(other["bytes_to_target"])
    assert other["cost"]["bytes_saved"] == pytest.approx(1 - other["bytes_to_target"] / (100 * 20))


def test_a_target_may_be_a_number(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [t / 100 for t in range(1, 101)], 10, 0.9, **algorithm("ghbm"))
    (row,) = compare(read_runs([tmp_path]), target=0.3).rows()
    assert row["rounds_to_target"] == 40  # the mean of rounds 21 to 40 is 0.305
    assert row["rounds_to_target_seeds"] == [40]


def test_the_interval_is_students(tmp_path: Path) -> None:
    finals = [0.81, 0.85, 0.79]
    for seed, final in enumerate(finals):
        made_up(tmp_path / str(seed), [0.5, final], 10, final, seed=seed, **algorithm("fedavg"))
    row = compare(read_runs([tmp_path])).rows()[0]
    assert row["accuracy_interval"] == pytest.approx(4.303 * np.std(finals, ddof=1) / np.sqrt(3))


def test_time_is_that_of_the_network(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5] * 30, 1_000_000, 0.5, **algorithm("fedavg"))
    network = Network(up_mbps=8, down_mbps=80, latency_ms=500, slowdown=10)
    (method,) = compare(read_runs([tmp_path]), network=network).methods
    each = 2 * 0.5 + 1 + 0.1 + 10 * 0.1  # latency twice, a megabyte up and down, ten times a tenth of a second
    assert method.seconds[-1] == pytest.approx(30 * each)
    slow = compare(read_runs([tmp_path]), network=network.model_copy(update={"straggle": 1.0})).methods[0]
    spread = [np.exp(draws(0, "network", t, 0).standard_normal()) for t in range(1, 31)]
    assert slow.seconds[-1] == pytest.approx(30 * (each - 1) + sum(spread))


@pytest.fixture
def three(tmp_path: Path) -> Comparison:
    for name, title, final in ("a", "fedavg", 0.5), ("b", "ghbm", 0.9), ("c", "fedhbm", 0.7):
        made_up(tmp_path / name, [final] * 30, 10, final, **algorithm(title))
    made_up(tmp_path / "d", [0.1] * 30, 10, None, status="diverged", **algorithm("fedcm"))
    return compare(read_runs([tmp_path]))


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


def test_csv_has_a_dash_for_a_seed_that_never_got_there() -> None:
    assert csv_of([{"seeds": [3, None]}]) == "seeds\n3 -\n"


def test_the_baseline_reaches_its_own_final_accuracy_in_short_runs_too(tmp_path: Path) -> None:
    """Final is the mean of the last third, and never of fewer rounds than what is compared with it."""
    for rounds in (12, 30, 60):
        curve = [0.1 + 0.7 * t / rounds for t in range(1, rounds + 1)]
        last = curve[-(rounds // 3) :]
        made_up(tmp_path / str(rounds), curve, 10, statistics.fmean(last), **algorithm("fedavg"))
        (row,) = compare(read_runs([tmp_path / str(rounds)])).rows()
        assert row["rounds_to_target"] == rounds


def test_a_method_that_diverged_costs_all_rounds_of_the_spec(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5] * 100, 10, 0.5, **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.9] * 30, 30, None, status="diverged", rounds=100, **algorithm("mimemom"))
    _, row = compare(read_runs([tmp_path])).rows()
    assert row["rounds_to_target"] is None
    assert row["rounds_to_target_seeds"] == [None]
    assert row["cost"]["share"] == 1.0
    assert row["cost"]["bytes"] == 100 * 60
    assert row["cost"]["bytes_saved"] == pytest.approx(-2.0)
    assert row["cost"]["seconds"] == pytest.approx(100 * 0.1)


def test_of_a_run_that_was_made_twice_the_whole_one_counts(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [0.5] * 2, 1, None, status="interrupted", **algorithm("fedavg"))
    made_up(tmp_path / "b", [0.5] * 2, 1, 0.5, **algorithm("fedavg"))
    (row,) = compare(read_runs([tmp_path])).rows()
    assert row["status"] == "finished"


def test_with_a_number_the_baseline_pays_for_what_it_needs(tmp_path: Path) -> None:
    made_up(tmp_path / "a", [t / 100 for t in range(1, 101)], 10, 0.9, **algorithm("fedavg"))
    made_up(tmp_path / "b", [min(1.0, t / 50) for t in range(1, 101)], 10, 1.0, **algorithm("ghbm"))
    base, other = compare(read_runs([tmp_path]), target=0.4).rows()
    assert base["cost"]["share"] == base["rounds_to_target"] / 100
    assert base["cost"]["bytes_saved"] == 0
    assert other["cost"]["bytes_saved"] == pytest.approx(other["bytes_saved"])


def test_settings_are_tables_of_their_own_and_columns_of_the_csv(tmp_path: Path) -> None:
    for alpha in (0.0, 10.0):
        for name in ("fedavg", "ghbm"):
            made_up(tmp_path / f"{name}{alpha}", [0.5], 1, 0.5, data={"alpha": alpha}, **algorithm(name))
    comparison = compare(read_runs([tmp_path]))
    sheets = results(comparison)
    assert [sheet.title for sheet in sheets] == ["digits, mlp: data.alpha = 0.0", "digits, mlp: data.alpha = 10.0"]
    assert [[row[0] for row in sheet.rows] for sheet in sheets] == [["FedAvg", "GHBM"]] * 2
    assert markdown(sheets[1]).startswith("digits, mlp: data.alpha = 10.0\n\n| method |")
    assert r"\multicolumn{6}{l}{digits, mlp: data.alpha = 0.0} \\" in latex(sheets[0])
    rows = list(csv.DictReader(csv_text(comparison).splitlines()))
    assert sorted(row["data.alpha"] for row in rows) == ["0.0", "0.0", "10.0", "10.0"]
    assert comparison.rows()[0]["fields"] == {"data.alpha": 0.0}


def test_engines_that_give_the_same_bits_are_one_method(tmp_path: Path) -> None:
    for seed, (asked, chosen) in enumerate([("auto", "pool"), ("serial", "serial"), ("pool", "pool")]):
        spec = make_spec({"rounds": 1, "seed": seed, "engine": {"name": asked, "workers": seed + 1}})
        folder = RunFolder.create(tmp_path / str(seed), spec, known(spec, engine=chosen))
        folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    assert [row["seeds"] for row in compare(read_runs([tmp_path])).rows()] == [3]


def test_rounds_of_seeds_stand_with_their_seeds(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 40, **algorithm("fedavg")})
    RunFolder.create(tmp_path / "0", spec, known(spec))  # it has only begun
    made_up(tmp_path / "1", [0.5] * 40, 1, 0.5, seed=1, **algorithm("fedavg"))
    (method,) = compare(read_runs([tmp_path])).methods
    assert dict(zip(method.seeds, method.reaches_by_seed(0.5), strict=True)) == {0: None, 1: method.window}
    assert method.status == "unfinished"


def test_a_report_changes_nothing_in_run_folders(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 2})
    folder = RunFolder.create(tmp_path / "a", spec, known(spec))
    folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    write_report(compare(read_runs([tmp_path])), tmp_path.parent / "report.html")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
