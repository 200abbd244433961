import shutil

import numpy as np
import pytest
import torch
from torch import nn

import keel
from keel import KeelError
from keel.engines import at_once, cohort
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task
from tests.conftest import uneven_data


class Own(nn.Module):
    """No chain of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def trained(algorithm: str, compiled: bool, sizes: tuple[int, ...], rounds: int) -> torch.Tensor:
    spec = make_spec(
        {
            "algorithm": {"name": algorithm},
            "rounds": rounds,
            "local": {"batch": 4, "lr": 0.05},
            "server": {"lr": 0.5},
            "participation": {"rate": 0.5},
            "engine": {"name": "cohort", "compile": compiled},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
        }
    )
    training = Training(spec, make_task(spec, module=Own(), data=uneven_data(sizes=sizes)))
    position = training.start()
    training.run(position, [])
    return position.server["theta"]


@pytest.mark.parametrize("algorithm", ["fedavg", "mime", "mimelitemom"])
def test_unequal_clients_need_few_programs(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler sees it: one that is asked for many forms gives up."""
    monkeypatch.setattr(cohort, "_compile", lambda program: torch.compile(program, fullgraph=True, backend="eager"))
    sizes = tuple(np.random.default_rng(0).integers(1, 40, 30).tolist())
    torch.compiler.reset()
    found, expected = (trained(algorithm, compiled, sizes, rounds=4) for compiled in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("default:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_a_compiled_program_gives_the_same_to_rounding(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    found, expected = (trained("fedavg", compiled, (8,) * 6, rounds=2) for compiled in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_other_engines_are_not_compiled() -> None:
    with pytest.raises(KeelError, match=r"engine.compile: is of the engine 'cohort', not of 'serial'"):
        keel.run({"engine": {"name": "serial", "compile": True}})


def test_how_many_processes_train_at_a_time() -> None:
    assert [at_once("serial", 8, 10), at_once("pool", 8, 2), at_once("pool", 2, 10)] == [1, 2, 2]
    assert [at_once("cohort", 8, 32), at_once("cohort", 8, 33), at_once("cohort", 2, 1000)] == [1, 2, 2]
