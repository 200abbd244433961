"""The contract suite of keel.testing, and its command for an algorithm outside the package.

That it passes for one is tested with docs/write-your-own-algorithm.md.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel.testing.test_contract import *  # noqa: F403

FED_EXP = '''
import torch

import keel


@keel.hyperparameters
class FedExP(keel.Algorithm):
    """FedAvg with an adaptive server step (Jhunjhunwala et al., ICLR 2023)."""

    name = "fedexp"
    title = "FedExP"
    paper = "Jhunjhunwala et al., ICLR 2023"

    epsilon: float = 1e-3

    def aggregate(self, server, reports, ctx):
        total, squares = 0.0, 0.0
        for report in reports:
            delta = report.message["delta"]
            total = total + report.weight * delta
            squares += report.weight * float(delta @ delta)
        step = max(1.0, squares / (2 * (float(total @ total) + self.epsilon)))
        return {"theta": server["theta"] - step * total}
'''


def suite(folder: Path, algorithm: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "keel.testing"]
    command += ["--algorithm", algorithm, *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ}, check=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope:X", "ERROR: --algorithm: cannot import 'nope:X' (ModuleNotFoundError: No module named 'nope')"),
        ("fedhmb", "ERROR: unknown --algorithm 'fedhmb'; did you mean 'fedhbm'?"),
    ],
)
def test_a_misspelt_algorithm_ends_the_suite_with_one_line(tmp_path: Path, name: str, message: str) -> None:
    ended = suite(tmp_path, name)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_the_suite_fails_for_an_algorithm_that_declares_a_false_property(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FED_EXP.replace("epsilon: float", "mean_suffices = True\n    epsilon: float"))
    ended = suite(tmp_path, "mine:FedExP", "-k", "mean_suffices")
    assert ended.returncode == 1
    assert "declare mean_suffices = False" in ended.stdout
