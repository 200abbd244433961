import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import keel
from keel import KeelError
from keel.engines import at_once, cohort
from keel.engines.cohort import GROUP
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


def trained(algorithm: str, compiled: bool, sizes: tuple[int, ...], rounds: int, workers: int = 1) -> torch.Tensor:
    spec = make_spec(
        {
            "algorithm": {"name": algorithm},
            "rounds": rounds,
            "local": {"batch": 4, "lr": 0.05},
            "server": {"lr": 0.5},
            "participation": {"rate": 0.5},
            "engine": {"name": "cohort", "compile": compiled, "workers": workers},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
        }
    )
    training = Training(spec, make_task(spec, module=Own(), data=uneven_data(sizes=sizes)))
    position = training.start()
    training.run(position, [])
    return position.server["theta"]


FORMS = {"fedavg": 3 * 2, "mime": 3 * (2 + 3), "mimelitemom": 3 * (2 + 3)}
"""Of 2, 8 and all rows; of 2 and 4 examples, and for full gradients also of 8, 32 and 128."""
UNEQUAL = tuple(np.random.default_rng(0).integers(1, 40, 30).tolist())


@pytest.mark.parametrize("algorithm", FORMS)
@pytest.mark.parametrize("sizes", [UNEQUAL, (3, 4, 2, 4)], ids=["many", "two, of less than a minibatch"])
def test_programs_get_the_form_that_they_were_compiled_for_and_are_few(
    algorithm: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = []

    def compiled(loss: Callable[..., Tensor], example: list[Tensor]) -> cohort.Gradients:
        forms.append(form := [(part.shape, part.stride(), part.dtype) for part in example])
        program = make_fx(lambda *rows: vmap(grad_and_value(loss))(*rows))(*example)

        def strict(*parts: Tensor) -> tuple[Tensor, Tensor]:
            assert [(part.shape, part.stride(), part.dtype) for part in parts] == form
            return program(*parts)

        return strict

    monkeypatch.setattr(cohort, "_compile", compiled)
    found, expected = (trained(algorithm, compiled, sizes, rounds=4) for compiled in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(forms) == len({str(form) for form in forms}) <= FORMS[algorithm]


@pytest.mark.filterwarnings("default:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_a_compiled_program_gives_the_same_to_rounding(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    sizes = (8,) * 4 * GROUP  # half of them take part: two groups, for two workers
    found, expected = (trained("mime", compiled, sizes, rounds=2, workers=2) for compiled in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(trained("mime", True, sizes, rounds=2, workers=1), found)


def test_other_engines_are_not_compiled() -> None:
    with pytest.raises(KeelError, match=r"engine.compile: is of the engine 'cohort', not of 'serial'"):
        keel.run({"engine": {"name": "serial", "compile": True}})


def test_how_many_processes_train_at_a_time() -> None:
    assert [at_once("serial", 8, 10), at_once("pool", 8, 2), at_once("pool", 2, 10)] == [1, 2, 2]
    assert [at_once("cohort", 8, 32), at_once("cohort", 8, 33), at_once("cohort", 2, 1000)] == [1, 2, 2]
