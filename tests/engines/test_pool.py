import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keel
from keel import KeelError
from keel.engines import FORKS
from keel.engines.pool import Pool
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task
from tests.conftest import small_network, uneven_data

pytestmark = pytest.mark.skipif(not FORKS, reason="the pool engine needs Linux, where processes fork")


def training(module: nn.Module | None = None, **tables: Any) -> Training:
    spec = make_spec(
        {
            "rounds": 3,
            "local": {"batch": 4},
            "participation": {"rate": 0.5},
            "engine": {"name": "pool", "workers": 2},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            **tables,
        }
    )
    return Training(spec, make_task(spec, module=module or small_network(), data=uneven_data()))


def test_workers_end_with_the_run() -> None:
    run = training()
    assert isinstance(run.engine, Pool)
    seen = []
    run.run(run.start(), [lambda *_: seen.append([w.process for w in run.engine.workers])])  # type: ignore[attr-defined]
    assert len(seen[0]) == 2
    assert seen[0] == seen[2]  # the same ones in every round
    assert not any(process.is_alive() for process in seen[0])


def test_there_are_no_workers_that_would_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.pool.cores", lambda: 1)
    run, seen = training(engine={"name": "pool", "workers": 500}), []
    run.run(run.start(), [lambda *_: seen.append(len(run.engine.workers))])  # type: ignore[attr-defined]
    assert set(seen) == {run.sampler.size}


class Wrong(nn.Module):
    """Fails in training, but not in the trial before the first round, which has two examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 2:
            raise ArithmeticError("this is wrong")
        return self.layer(inputs)


def test_an_error_in_a_worker_is_raised_with_where_it_was() -> None:
    run = training(Wrong())
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*forward.*this is wrong"):
        run.run(run.start(), [])
    assert run.engine.workers == []  # type: ignore[attr-defined]


def test_a_worker_that_is_killed_is_told_of() -> None:
    run = training(rounds=50)

    def kill(record: dict[str, Any], *_: Any) -> None:
        if record["round"] == 2:
            os.kill(run.engine.workers[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    with pytest.raises(OSError, match=r"a worker process ended \(exit code -9\)"):
        run.run(run.start(), [kill])


class Growing(keel.Algorithm):
    """Remembers more each time."""

    name = "growing"
    title = "Growing"
    paper = "none"

    def report(self, path: Any, received: Any, memory: Any, ctx: Any) -> Any:
        message, _ = super().report(path, received, memory, ctx)
        return message, {**memory, f"round{ctx.round}": path.end}


def test_a_memory_that_changes_its_form_is_refused() -> None:
    run = training(algorithm=keel.hyperparameters(Growing)(), participation={"rate": 1.0})
    with pytest.raises(KeelError, match=r"changes its form .* accepted: engine\.name = 'serial'"):
        run.run(run.start(), [])


class Varying(keel.Algorithm):
    """Sends its clients a pull towards zero in every second round."""

    name = "varying"
    title = "Varying"
    paper = "none"

    def broadcast(self, server: Any, ctx: Any) -> Any:
        more = {"pull": 0.1 * server["theta"]} if ctx.round % 2 == 0 else {}
        return {**super().broadcast(server, ctx), **more}

    def direction(self, w: Any, gradient: Any, received: Any, memory: Any, ctx: Any) -> Any:
        return gradient(w) + received.get("pull", 0)


def test_a_message_may_grow_and_shrink() -> None:
    varying = keel.hyperparameters(Varying)()
    ends = []
    for engine in ("serial", "pool"):
        run = training(algorithm=varying, engine={"name": engine, "workers": 2})
        position = run.start()
        run.run(position, [])
        ends.append(position.server["theta"])
    assert torch.equal(*ends)


def test_a_first_phase_that_is_told_less_keeps_its_workers() -> None:
    run = training(algorithm={"name": "mime"})
    seen = []
    run.run(run.start(), [lambda *_: seen.append([w.process for w in run.engine.workers])])  # type: ignore[attr-defined]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(how: int, tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import keel
        def tell(record, *_):
            if record["round"] == 3:
                print("going", flush=True)
        spec = {"rounds": 100000, "engine": {"name": "pool", "workers": 2}, "evaluation": {"every": 1000}}
        keel.run(spec, out="run", hooks=[tell])
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    assert parent.stdout.readline() == b"going\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) == 2
    if how == signal.SIGINT:
        os.killpg(parent.pid, how)  # as a terminal does
    else:
        parent.send_signal(how)
    parent.wait(timeout=60)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(_alive(int(child)) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(int(child)) for child in children)
    said = parent.stderr.read()  # by the parent and the workers
    parent.stderr.close()
    if how == signal.SIGKILL:
        assert said == b""
    else:
        assert keel.resume(tmp_path / "run", hooks=[_stop]).summary["rounds"] > 3


def _stop(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
