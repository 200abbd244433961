"""What tests share: small tasks, and the command called in this process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

from keel.cli import main
from keel.data.federated import Examples, FederatedData, Partition
from keel.rounds import Record, Training
from keel.runs.spec import Spec, make_spec
from keel.task import Task, make_task

torch.set_num_threads(1)
os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}  # tests tell nobody
os.environ |= {"RAY_worker_niceness": "0"}  # or its workers wait for minutes behind the tests that run beside them
settings.register_profile("keel", deadline=None, max_examples=60)
settings.load_profile("keel")


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str


@pytest.fixture
def keel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Called]:
    """Calls the command as a user would, from an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Called:
        monkeypatch.setattr(sys, "argv", ["keel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Called(int(ended.value.code or 0), captured.out, captured.err)

    return call


def uneven_data(seed: int = 0, sizes: tuple[int, ...] = (3, 11, 7, 4, 16, 9), inputs: int = 5) -> FederatedData:
    """Clients of unequal size with unequal label mixes, three classes."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    labels = (client + rng.integers(0, 2, total)) % 3
    features = rng.normal(size=(total, inputs)) + labels[:, None] + 0.3 * client[:, None]
    examples = Examples(torch.from_numpy(features).float(), torch.from_numpy(labels))
    parts = [np.flatnonzero(client == c) for c in range(len(sizes))]
    return FederatedData("uneven", examples, examples, Partition.of(parts), 3)


def small_network(seed: int = 0, inputs: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 3))


def uneven_training(table: dict[str, Any]) -> Training:
    """A training on uneven clients with unequal steps, weight decay and partial participation."""
    base: dict[str, Any] = {
        "rounds": 25,
        "local": {"epochs": 2, "batch": 4, "lr": 0.1, "weight_decay": 0.01},
        "participation": {"rate": 0.5},
        "evaluation": {"every": 5, "last": 1},
        "engine": {"name": "serial"},
    }
    if "steps" in table.get("local", {}):
        del base["local"]["epochs"]
    merged = {**base, **{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in table.items()}}
    spec: Spec = make_spec({**merged, "data": {"name": "custom"}, "model": {"name": "custom"}})
    task: Task = make_task(spec, module=small_network(), data=uneven_data())
    return Training(spec, task)


def records_of(training: Training) -> list[Record]:
    records: list[Record] = []
    training.run(training.start(), [lambda record, *_: records.append(record)])
    return records


def stopped_by_ctrl_c(command: list[str], folder: Path, metrics: str, lines: int) -> None:
    """Runs a command until one of its runs has so many lines, then presses Ctrl-C as a terminal does."""
    group = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, start_new_session=True)
    until = time.monotonic() + 90
    while time.monotonic() < until and not any(file.read_text().count("\n") > lines for file in folder.glob(metrics)):
        time.sleep(0.02)
    os.killpg(group.pid, signal.SIGINT)
    _, messages = group.communicate(timeout=90)
    assert group.returncode == 130
    assert b"the same command goes on" in messages
    assert b"Traceback" not in messages
