"""engine.compile: programs of `cohort` that PyTorch's compiler translates to machine code."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from keel.config.defaults import make_spec
from keel.core.torch_adapter import Compiled
from keel.engines import stacked_gradients
from keel.engines.cohort import GROUP
from keel.runs.build import make_task
from tests.conftest import make_loop, uneven_data


class CustomNetwork(nn.Module):
    """Not a chain of plain layers."""

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
    training = make_loop(spec, make_task(spec, module=CustomNetwork(), data=uneven_data(sizes=sizes)))
    state = training.start()
    training.run(state, [])
    return state.server["theta"]


SHAPES = {"fedavg": 3 * 2, "mime": 3 * (2 + 3), "mimelitemom": 3 * (2 + 3)}
"""2, 8 or all rows; 2 or 4 examples, and for full gradients also 8, 32 and 128."""
UNEQUAL = tuple(np.random.default_rng(0).integers(1, 40, 30).tolist())


@pytest.mark.parametrize("algorithm", SHAPES)
@pytest.mark.parametrize("sizes", [UNEQUAL, (3, 4, 2, 4)], ids=["many", "less than a minibatch"])
def test_programs_are_few_and_get_tensors_of_the_shape_they_were_compiled_for(
    algorithm: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def compile_gradients(recorded: GraphModule, example: list[Tensor]) -> Compiled:
        """Return a program that is not compiled, but as strict as one that is."""
        shapes.append(shape := [(part.shape, part.stride(), part.dtype) for part in example])

        def program(*parts: Tensor) -> tuple[Tensor, Tensor]:
            assert [(part.shape, part.stride(), part.dtype) for part in parts] == shape
            return recorded(*parts)

        return program

    monkeypatch.setattr(stacked_gradients, "compile_gradients", compile_gradients)
    result, expected = (trained(algorithm, compiled, sizes, rounds=4) for compiled in (True, False))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert 0 < len(shapes) == len({str(shape) for shape in shapes}) <= SHAPES[algorithm]


@pytest.mark.filterwarnings("default:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_a_compiled_program_agrees_to_rounding_with_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)  # pays only for more than one program
    monkeypatch.setattr(config, "compile_threads", 1)  # in this process: others would import PyTorch first
    monkeypatch.setattr(config.cpp, "vec_isa_ok", True)  # not checked by compiling another program
    torch.compiler.reset()
    sizes = (8,) * 4 * GROUP  # half of them take part: two groups of one shape, for two workers
    compiled = trained("fedavg", True, sizes, rounds=2)
    torch.testing.assert_close(compiled, trained("fedavg", False, sizes, rounds=2), rtol=1e-4, atol=1e-5)
    assert torch.equal(trained("fedavg", True, sizes, rounds=2, workers=2), compiled)
