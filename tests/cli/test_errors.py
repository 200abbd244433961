"""Errors of a spec that are reported before PyTorch is imported."""

import json
import subprocess
import sys
from typing import Any

import pytest

WITHOUT_PYTORCH = """
import json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

sys.modules["torch"] = None  # importing it fails
from keel.cli import main

ended = {}
for command in json.load(sys.stdin):
    sys.argv = ["keel", *command.split()]
    out, err = StringIO(), StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        ended[command] = {"code": end.code, "out": out.getvalue(), "err": err.getvalue(), "files": os.listdir()}
print(json.dumps(ended))
"""
ALGORITHM = "unknown algorithm.name 'fedhmb'; did you mean 'fedhbm'? known: adabest, centralized, "
LEARNING_RATE = "local.lr must be greater than 0 (got -1)"
MISSING = "spec: file 'missing.toml' does not exist"


CASES = [
    ("run --algorithm fedhmb", ALGORITHM),
    ("run --data digts", "unknown data.name 'digts'; did you mean 'digits'? known: arrays, cifar10, "),
    ("run --model mpl", "unknown model.name 'mpl'; did you mean 'mlp'? known: char_lstm, cnn, lenet, "),
    ("run --engine seral", "unknown engine.name 'seral'; did you mean 'serial'? known: auto, cohort, pool, ray, "),
    ("run --set participation.sampler=cycle", "unknown participation.sampler 'cycle'; did you mean 'cyclic'? "),
    ("run --set locl.lr=1", "unknown spec field 'locl'; did you mean 'local'? known: algorithm, "),
    (
        "run --set server.rl=1",
        "unknown server field 'rl'; known: clip, decay, largest_weight, lr, ",
    ),
    ("run --set local.lr=-1", LEARNING_RATE),
    ("run --set rounds=abc", "rounds must be a valid integer (got 'abc')"),
    ("run --set local.precision=fp8", "local.precision must be 'float32' or 'bf16' (got 'fp8')"),
    ("run --set local.steps=3 --set local.epochs=1", "set either local.epochs or local.steps (got epochs = 1, "),
    ("run --partition iid --alpha 1", "data.alpha = 1.0 requires data.partition = 'dirichlet', "),
    ("run --engine pool --address auto", "engine: address requires name = 'ray', 'cohort' or 'auto' (got 'pool')"),
    ("run missing.toml", MISSING),
    ("run broken.toml", "spec: 'broken.toml' is not valid TOML (Invalid value (at end of document))"),
    ("compare --methods fedavg,fedhmb", ALGORITHM),
    ("compare --methods fedavg --over local.lr=-1,1", LEARNING_RATE),
    ("compare missing.toml --methods fedavg", MISSING),
    ("sweep --set local.lr=-1 --over rounds=1,2", LEARNING_RATE),
    ("sweep --method gird --over rounds=1,2", "search.method must be 'grid', 'random' or 'optuna' (got 'gird')"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each command ended. One process runs all, because it takes longer to start than to run them."""
    folder = tmp_path_factory.mktemp("errors")
    (folder / "broken.toml").write_text("rounds = [")
    commands = json.dumps([command for command, _ in CASES])
    arguments = [sys.executable, "-c", WITHOUT_PYTORCH]
    return json.loads(
        subprocess.run(arguments, cwd=folder, input=commands, text=True, capture_output=True, check=True).stdout
    )


@pytest.mark.parametrize(("command", "message"), CASES)
def test_an_error_of_a_spec_is_reported_without_pytorch(
    ended: dict[str, dict[str, Any]], command: str, message: str
) -> None:
    end = ended[command]
    assert end["err"].startswith(f"keel: {message}")
    assert (end["code"], end["out"], end["err"].count("\n")) == (2, "", 1)
    assert end["files"] == ["broken.toml"]
