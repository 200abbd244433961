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
from keel.config.defaults import make_spec
from keel.core.loop import Loop
from keel.engines import FORKS
from keel.engines.pool import Pool
from keel.engines.shared_memory import _write
from keel.runs.build import make_task
from tests.conftest import make_loop, small_network, uneven_data

pytestmark = pytest.mark.skipif(not FORKS, reason="the pool engine needs Linux, where processes fork")


def training(module: nn.Module | None = None, **tables: Any) -> Loop:
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
    return make_loop(spec, make_task(spec, module=module or small_network(), data=uneven_data()))


def test_workers_end_with_the_run() -> None:
    run = training()
    assert isinstance(run.engine, Pool)
    processes: list[Any] = []
    run.run(run.start(), [lambda *_: processes.append([w.process for w in run.engine.workers])])  # type: ignore[attr-defined]
    assert len(processes[0]) == 2
    assert processes[0] == processes[2]  # the same ones in every round
    assert not any(process.is_alive() for process in processes[0])


def test_there_are_no_more_workers_than_clients_of_a_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.pool.cores", lambda: 1)
    run, counts = training(engine={"name": "pool", "workers": 500}), []
    run.run(run.start(), [lambda *_: counts.append(len(run.engine.workers))])  # type: ignore[attr-defined]
    assert set(counts) == {run.sampler.size}


class Wrong(nn.Module):
    """Fails in training, but not in the trial before the first round, which has two examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 2:
            raise ArithmeticError("this is wrong")
        return self.layer(inputs)


def test_an_error_in_a_worker_is_raised_with_its_traceback() -> None:
    run = training(Wrong())
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*forward.*this is wrong"):
        run.run(run.start(), [])
    assert run.engine.workers == []  # type: ignore[attr-defined]


def test_a_killed_worker_ends_the_run_with_its_exit_code() -> None:
    run = training(rounds=50)

    def kill(record: dict[str, Any], *_: Any) -> None:
        if record["round"] == 2:
            os.kill(run.engine.workers[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    with pytest.raises(OSError, match=r"a worker process ended \(exit code -9\)"):
        run.run(run.start(), [kill])


class Growing(keel.Algorithm):
    """Adds a tensor to its client state in every round."""

    name = "growing"
    title = "Growing"
    paper = "none"

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        message, _ = super().report(path, received, state, ctx)
        return message, {**state, f"round{ctx.round}": path.end}


def test_a_client_state_that_changes_its_names_is_refused() -> None:
    run = training(algorithm=keel.hyperparameters(Growing)(), participation={"rate": 1.0})
    with pytest.raises(
        KeelError, match=r"engine\.name = 'pool' requires .* keep their names, types and shapes \(from .*; use 'serial'"
    ):
        run.run(run.start(), [])


def test_the_error_for_another_form_prints_types_and_shapes() -> None:
    rows, changed = {"c": torch.zeros(2, 3), "n": torch.zeros(2, 1)}, {"c": torch.zeros(4), "n": torch.zeros(1).long()}
    expected = r"\(from c: float32 \[3\], n: float32 \[1\] to c: float32 \[4\], n: int64 \[1\]\); use 'serial'$"
    with pytest.raises(KeelError, match=expected):
        _write(rows, 0, changed)
    with pytest.raises(KeelError, match=r"to none\)"):
        _write(rows, 0, {})


class Varying(keel.Algorithm):
    """Broadcasts a pull towards zero in every second round."""

    name = "varying"
    title = "Varying"
    paper = "none"

    def broadcast(self, server: Any, ctx: Any) -> Any:
        more = {"pull": 0.1 * server["theta"]} if ctx.round % 2 == 0 else {}
        return {**super().broadcast(server, ctx), **more}

    def direction(self, w: Any, gradient: Any, received: Any, state: Any, ctx: Any) -> Any:
        return gradient(w) + received.get("pull", 0)


def test_the_names_of_a_broadcast_may_change_between_rounds() -> None:
    varying = keel.hyperparameters(Varying)()
    models = []
    for engine in ("serial", "pool"):
        run = training(algorithm=varying, engine={"name": engine, "workers": 2})
        state = run.start()
        run.run(state, [])
        models.append(state.server["theta"])
    assert torch.equal(*models)


def test_a_first_phase_with_a_smaller_broadcast_keeps_the_workers() -> None:
    run = training(algorithm={"name": "mime"})
    processes: list[Any] = []
    run.run(run.start(), [lambda *_: processes.append([w.process for w in run.engine.workers])])  # type: ignore[attr-defined]
    assert processes[0] == processes[1] == processes[2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(how: int, tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import keel
        def report(record, *_):
            if record["round"] == 3:
                print("round 3", flush=True)
        spec = {"rounds": 100000, "engine": {"name": "pool", "workers": 2}, "evaluation": {"every": 1000}}
        keel.run(spec, out="run", hooks=[report])
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
    assert parent.stdout.readline() == b"round 3\n"
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
    output = parent.stderr.read()  # of the parent and the workers
    parent.stderr.close()
    if how == signal.SIGKILL:
        assert output == b""
    else:
        assert keel.resume(tmp_path / "run", hooks=[_stop]).summary["rounds"] > 3


def _stop(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_an_engine_before_its_first_round_and_twice_is_safe() -> None:
    run = training()
    run.engine.close()
    run.engine.close()
    state = run.start()
    assert run.run(state, []) == "finished"  # which closes it
    run.engine.close()
    again = run.start()
    run.run(again, [])
    assert torch.equal(state.server["theta"], again.server["theta"])
