"""The commands, called in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest

from keel import run
from keel.cli import main
from keel.data.catalog import CATALOG
from keel.units import size
from tests.conftest import Called

Keel = Callable[..., Called]


def test_run_from_options(keel: Keel, tmp_path: Path) -> None:
    called = keel("run", "--algorithm", "ghbm", "--rounds", "20", "--set", "algorithm.tau=20", "--json")
    assert called.code == 0
    summary = json.loads(called.out)
    assert summary["path"] == "runs/digits-mlp-ghbm-seed0"
    assert {"status", "rounds", "accuracy", "bytes_down", "bytes_up", "seconds", "engine", "seed", "model_sha256"} <= (
        summary.keys()
    )
    assert "tau = 20" in (tmp_path / summary["path"] / "spec.toml").read_text()
    assert "GHBM: 20 of 20 rounds" in called.err


def test_a_path_that_is_not_unicode_is_printed_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = os.fsdecode(b"\xff")
    monkeypatch.setattr(sys, "argv", ["keel", "run", "--rounds", "1", "--engine", "serial", "--quiet", "--out", out])
    monkeypatch.setattr(sys, "stdout", printed := TextIOWrapper(BytesIO(), "utf-8"))
    with pytest.raises(SystemExit) as ended:
        main()
    printed.seek(0)
    assert (ended.value.code, printed.read().splitlines()[-1]) == (0, r"run: \udcff")


def test_the_progress_of_a_resumed_run_includes_the_bytes_before_the_stop(keel: Keel, tmp_path: Path) -> None:
    rounds: list[int] = []
    hooks = [lambda record, *_: rounds.append(record["round"])]
    stopped = run({"rounds": 20}, out=tmp_path / "run", hooks=hooks, stop=lambda: len(rounds) == 9)
    assert stopped.status == "interrupted"
    called = keel("resume", "run", "--json")
    summary = json.loads(called.out)
    total = size(summary["bytes_down"] + summary["bytes_up"])
    assert called.err.splitlines()[-1].startswith(f"GHBM: 20 of 20 rounds  {total}  ")


def test_the_engine_and_its_reason_are_printed_before_the_first_round(keel: Keel, tmp_path: Path) -> None:
    (tmp_path / "dropping.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Dropout(), nn.Linear(64, 10))\n"
    )
    lines = keel("run", "--rounds", "1", "--model", "dropping:net").err.splitlines()
    assert lines[0].startswith("Footprint: ")
    assert lines[1].endswith(", because the model or its loss draws random numbers, as dropout does.")
    assert lines[2].startswith("GHBM: 1 of 1 rounds")


def test_run_from_a_spec_with_overrides(keel: Keel, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('rounds = 5\n[algorithm]\nname = "fedhbm"\n[local]\nbatch = 4\n')
    called = keel("run", "spec.toml", "--seed", "3", "--lr", "0.05", "--out", "here", "--quiet")
    assert called.code == 0
    assert called.err == ""
    assert called.out.startswith("finished after 5 rounds: accuracy ")
    written = (tmp_path / "here" / "spec.toml").read_text()
    assert "seed = 3" in written
    assert "lr = 0.05" in written
    assert "batch = 4" in written


def test_a_resolved_spec_repeats_the_run_bit_for_bit(keel: Keel, tmp_path: Path) -> None:
    one = json.loads(keel("run", "--rounds", "5", "--json", "--quiet").out)
    two = json.loads(keel("run", Path(one["path"]) / "spec.toml", "--json", "--quiet").out)
    assert one["model_sha256"] == two["model_sha256"]
    assert two["path"] == one["path"] + "-2"


def test_run_on_arrays_of_the_user(keel: Keel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 60)
    np.save(tmp_path / "x.npy", rng.normal(size=(60, 4)) + labels[:, None])
    np.save(tmp_path / "y.npy", labels)
    np.save(tmp_path / "who.npy", np.repeat(["anna", "ben", "cleo", "dan"], 15))
    files = ["data.inputs=x.npy", "data.labels=y.npy", "data.test_inputs=x.npy", "data.test_labels=y.npy"]
    options = [word for file in files for word in ("--set", file)]
    common = ["run", "--data", "arrays", *options, "--rounds", "3", "--set", "participation.rate=0.5", "--quiet"]
    by_key = [*common, "--set", "data.keys=who.npy", "--set", "data.partition=key", "--json"]
    called = keel(*by_key)
    assert called.code == 0, called.err
    assert json.loads(called.out)["status"] == "finished"

    np.save(tmp_path / "y.npy", labels[:50])
    called = keel(*by_key, "--out", "wrong")
    assert called.code == 2
    assert all(part in called.err for part in ("data.labels", "50", "60"))
    assert called.err.count("\n") == 1
    assert not (tmp_path / "wrong").exists()


def test_a_pickle_instead_of_an_array_is_not_loaded(keel: Keel, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    names = ("inputs", "labels", "test_inputs", "test_labels")
    options = [word for name in names for word in ("--set", f"data.{name}=x.npy")]
    called = keel("run", "--data", "arrays", "--clients", "2", *options)
    assert called.code == 2
    assert "data.inputs" in called.err
    assert ".npy" in called.err
    assert "allow_pickle" not in called.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.toml"], "'nowhere.toml'"),
        (["run", "--algorithm", "fedagv"], "did you mean 'fedavg'?"),
        (["run", "--set", "participation.rate=0"], "participation.rate"),
        (["run", "--set", "algorithm.tau=0"], "algorithm.tau"),
        (["run", "--clients", "5000"], "5000"),
        (["run", "--clients", "7"], "at least 10, the number of classes"),
        (["run", "--set", "model.hidden=[0]"], "model.hidden.0"),
        (["run", "--set", "model.hidden=many"], "model.hidden"),
        (["run", "--model", "custom"], "Python"),
        (["run", "--set", "model.hidden=[99999999999999]"], "model"),
        (["run", "--algorithm", "GHBM"], "did you mean 'ghbm'?"),
        (["run", "--rounds", "x"], "--rounds"),
        (["run", "--nonsense"], "--nonsense"),
        (["resume", "nowhere"], "'nowhere'"),
        (["report", "nowhere"], "'nowhere'"),
        (["report"], "Missing argument"),
        (["demo", "--seeds", "0"], "--seeds"),
        (["fly"], "fly"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_written(
    keel: Keel, arguments: list[str], message: str, tmp_path: Path
) -> None:
    called = keel(*arguments)
    assert called.code == 2
    assert called.err.startswith("keel: ")
    assert called.err.count("\n") == 1
    assert message in called.err
    assert called.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "keel: No such command 'rnu'. Did you mean 'run'?\n"),
        (["dmeo"], "keel: No such command 'dmeo'. Did you mean 'demo', 'deploy'?\n"),
        (["data", "lsit"], "keel: No such command 'lsit'. Did you mean 'list'?\n"),
    ],
)
def test_a_misspelt_command_is_suggested_once(keel: Keel, arguments: list[str], message: str) -> None:
    assert keel(*arguments).err == message


def test_a_spec_that_is_not_toml_is_an_error_of_one_line(keel: Keel, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("rounds = = 3")
    called = keel("run", "spec.toml")
    assert called.code == 2
    assert "is not valid TOML" in called.err
    assert called.err.count("\n") == 1


def test_data_get_of_the_users_files_makes_no_folder(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "data"))
    ended = keel("data", "get", "arrays")
    assert (ended.code, list(tmp_path.iterdir())) == (2, [])
    assert ended.err.startswith("keel: data.name: 'arrays' reads your files and downloads none")


def test_debug_prints_the_traceback_behind_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keel", "--debug", "run", "--data", "no_such_module:load"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("keel: data.name: cannot import 'no_such_module:load'")


def test_algorithms_as_json(keel: Keel) -> None:
    rows = {row["name"]: row for row in json.loads(keel("algorithms", "--json").out)}
    for row in rows.values():
        assert row.keys() == {"name", "title", "paper", "stateful", "mean_suffices", "down", "up", "relative_cost"}
    costs = {
        0.0: ["centralized"],
        0.86: ["fedper"],
        1.0: ["fedavg", "fedprox", "feddyn", "adabest", "fedavgm", "fedacg", "localghbm", "fedhbm",
              "fedadam", "fedyogi", "fedadagrad", "fedlesam", "fedspeed", "delta_sgd", "fednova", "fedexp", "fedsam",
              "diloco", "ditto", "ghbm_lookahead"],
        1.5: ["ghbm", "ghbm_theory", "fedcm", "fedadc", "fedadamw", "mofedsam"],
        2.0: ["scaffold", "mimelitemom", "mime"],
        2.5: ["scaffold_m", "mimemom"],
    }  # fmt: skip
    assert {name: round(row["relative_cost"], 2) for name, row in rows.items()} == {
        name: cost for cost, names in costs.items() for name in names
    }
    stateful = {name for name, row in rows.items() if row["stateful"]}
    assert stateful == {
        "adabest", "ditto", "feddyn", "fedhbm", "fedlesam", "fedper", "fedspeed", "localghbm", "scaffold", "scaffold_m",
    }  # fmt: skip
    needs_more_than_the_mean = {name for name, row in rows.items() if not row["mean_suffices"]}
    assert needs_more_than_the_mean == {"centralized", "fedcm", "ghbm_theory", "mofedsam", "scaffold_m"}


def test_algorithms_fit_a_terminal(keel: Keel) -> None:
    out = keel("algorithms").out
    assert "fedhbm" in out
    for column in ("client state", "mean suffices", "cost"):
        assert f"\n{column}: " in out
    assert max(map(len, out.splitlines())) <= 80


def test_run_an_algorithm_of_the_user_by_name(keel: Keel, tmp_path: Path) -> None:
    own = Path(__file__).parents[1] / "contract" / "own.py"
    (tmp_path / "my_algorithms.py").write_text(own.read_text())
    options = ["--algorithm", "my_algorithms:Lookahead", "--set", "algorithm.lean=0.2", "--rounds", "3", "--quiet"]
    called = keel("run", *options, "--out", "run")
    assert called.code == 0, called.err
    assert keel("resume", "run").code == 0


def test_keel_without_a_command_prints_the_help(keel: Keel) -> None:
    called = keel()
    assert called.code == 0
    assert "Commands:" in called.out
    assert "  run " in called.out


def test_keel_prints_its_version(keel: Keel) -> None:
    assert keel("--version").out == "0.1.0\n"


@pytest.mark.parametrize("command", ["resume", "report", "data show", "deploy new", "paper run"])
def test_help_does_not_escape_brackets(keel: Keel, command: str) -> None:
    shown = keel(*command.split(), "--help").out
    assert "[required]" in shown
    assert "\\[" not in shown


@pytest.mark.parametrize("command", ["", "data", "deploy", "paper"])
def test_the_list_of_commands_fits_80_columns(keel: Keel, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = keel(*command.split(), "--help").out.partition("Commands:")[2]
    assert "." in shown
    assert "..." not in shown


def test_help_does_not_import_pytorch() -> None:
    code = "import sys, keel.cli; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_public_names_can_be_imported() -> None:
    import keel

    for name in keel.__all__:
        assert getattr(keel, name) is not None
    assert set(keel.__all__) == set(keel._HOMES)
    with pytest.raises(AttributeError):
        _ = keel.nonsense


def test_data_list_names_the_files_of_each_data_set(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "none"))
    called = keel("data", "list", "--json")
    rows = {row["name"]: row for row in json.loads(called.out)}
    assert rows["digits"]["files"] == "embedded"
    assert rows["cifar10"]["files"] == "keel data get"
    assert rows["cifar10"]["address"].startswith("https://")
    assert rows["landmarks"]["files"] == "copy by hand"
    assert rows["table"]["files"] == "your files"
    text = keel("data", "list").out
    assert all(name in text for name in rows)
    assert str(tmp_path / "none") in text


def test_data_show_prints_the_label_distribution(keel: Keel) -> None:
    statistics = json.loads(keel("data", "show", "digits", "--alpha", "0", "--json").out)
    assert (statistics["clients"], statistics["classes"], statistics["label_entropy"]) == (100, 10, 0.0)
    shown = keel("data", "show", "digits", "--partition", "iid", "--clients", "10").out
    assert "10 clients with 150 examples each" in " ".join(shown.split())
    assert "░" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (["--partition", "dirichlet_per_class", "--alpha", "0.5"], "alpha = 0.5 per class"),
        (["--partition", "quantity", "--alpha", "2"], "quantity skew, alpha = 2"),
        (["--partition", "shards"], "shards per client: 2"),
        (["--set", "data.classes_per_client=3"], "classes per client: 3"),
        (["--set", "data.noise=0.2"], "feature shift, noise = 0.2"),
    ],
)
def test_partitioning_schemes_are_chosen_on_the_command_line(keel: Keel, options: list[str], label: str) -> None:
    shown = keel("data", "show", "digits", "--clients", "10", *options)
    assert shown.code == 0, shown.err
    assert f"digits ({label}): 10 clients" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "show", "cifar"], "did you mean 'cifar10'?"),
        (["data", "get", "cifra10"], "did you mean 'cifar10'?"),
        (["data", "show", "landmarks"], "federated_train.csv"),
        (["data", "show", "cifar10"], "keel data get cifar10"),
        (["run", "--data", "mnist"], "keel data get mnist"),
    ],
)
def test_missing_data_is_an_error_of_one_line(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "none"))
    called = keel(*words)
    assert called.code == 2
    assert message in called.err
    assert called.err.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_data_get_of_embedded_data_downloads_nothing(keel: Keel) -> None:
    assert keel("data", "get", "digits").out == "digits needs no files\n"


def test_a_table_in_a_pipe_has_one_line_per_row(keel: Keel) -> None:
    lines = keel("data", "list").out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(CATALOG)]] == list(CATALOG)


def test_an_impossible_data_folder_is_an_error_of_one_line(keel: Keel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_DATA", "/dev/null/data")
    called = keel("data", "get", "cifar10")
    assert called.code == 2
    assert called.err.startswith("keel: ")
    assert "'/dev/null/data'" in called.err
