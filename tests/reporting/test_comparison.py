import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from keel import KeelError, Spec, make_spec
from keel.reporting.comparison import compare
from keel.reporting.page import write_report
from keel.reporting.tables import explanation, saving, size
from keel.runs.batch import read_runs
from keel.runs.folder import RunFolder


def known(spec: Spec, **changes: object) -> dict[str, object]:
    """What a run knows of its surroundings, as far as a comparison reads it."""
    task = {"examples_sha256": "e", "parameters": 1, "loss": "cross entropy"}
    return {"title": spec.algorithm.title, **task, **changes}


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
    with pytest.raises(KeelError, match="--baseline: 'fedagv' is not known"):
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
    assert [saving(x) for x in (0.5, -0.25, None)] == ["50 %", "-25 %", "-"]
    assert json.dumps([saving(0.0)]) == '["0 %"]'
