"""Limits of a request at a site: its time and the memory of the client process."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy.site_limits import memory_limit
from tests.deploy.policies import write_policy
from tests.deploy.requests import ask, node_with


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def stuck(node: Any) -> Any:
    time.sleep(60)


def stuck_and_stubborn(node: Any) -> Any:
    """Sleep, and catch every exception on the way."""
    for _ in range(60):
        try:
            time.sleep(1)
        except Exception:
            continue


@pytest.mark.parametrize("loader", [stuck, stuck_and_stubborn])
def test_a_stuck_loader_is_ended_at_its_timeout(loader: Any, tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, timeout_seconds=0.3), tmp_path / "state")
    start = time.monotonic()
    assert ask("query", linear, loader, node, torch.zeros(10), local__steps=2).error.reason == "timeout: RequestTimeout"
    assert time.monotonic() - start < 5


def test_a_process_that_does_not_return_to_python_is_ended() -> None:
    # A blocked signal stands for code that never returns to Python.
    program = (
        "import signal, time\nfrom keel.deploy import site_limits\nsite_limits.GRACE_SECONDS = 0.2\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "with site_limits.time_limit(0.2):\n    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "ending the client process" in ended.stderr + ended.stdout


def test_an_allocation_beyond_the_limit_fails_and_the_limit_ends_with_the_request() -> None:
    with memory_limit(64), pytest.raises(MemoryError):
        np.ones(2**30)
    assert np.ones(2**24).sum() == 2**24


def test_a_loader_beyond_the_limit_is_an_error_of_the_data(tmp_path: Path) -> None:
    node = node_with(write_policy(tmp_path, max_memory_mb=16384), tmp_path / "state")
    reply = ask("query", linear, lambda node: np.ones(2**36), node, torch.zeros(10), local__steps=2)
    assert reply.error.reason in ("data: MemoryError", "data: _ArrayMemoryError")
