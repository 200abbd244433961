"""local.precision = "bf16": forward and backward passes in bfloat16, everything else in float32."""

import pytest
import torch
from torch import Tensor, nn

from keel import KeelError
from keel.config.defaults import make_spec
from keel.core.flat_model import FlatModel
from keel.engines import FORKS
from tests.conftest import uneven_loop

ENGINES = ["serial", "cohort", *(["pool"] if FORKS else [])]


def trained(precision: str, engine: str) -> Tensor:
    loop = uneven_loop(
        {
            "local": {"precision": precision, "batch": 4, "lr": 0.1},
            "rounds": 5,
            "engine": {"name": engine, "workers": 2},
        }
    )
    state = loop.start()
    loop.run(state)
    return state.server["theta"]


def test_passes_are_in_bfloat16_and_the_rest_in_float32() -> None:
    seen: list[torch.dtype] = []
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].register_forward_hook(lambda layer, inputs, outputs: seen.append(outputs.dtype))
    model = FlatModel(module, precision="bf16")
    outputs = model.outputs(torch.randn(5, 3))
    assert seen == [torch.bfloat16]
    assert {outputs.dtype, model.weights.dtype, model.gradient(outputs.sum()).dtype} == {torch.float32}


@pytest.mark.parametrize("engine", ENGINES)
def test_results_are_close_to_those_in_float32_but_not_the_same(engine: str) -> None:
    half, full = trained("bf16", engine), trained("float32", engine)
    assert not torch.equal(half, full)
    torch.testing.assert_close(half, full, rtol=0, atol=0.02)


@pytest.mark.skipif(not FORKS, reason="pool requires processes that fork")
def test_pool_gives_the_bits_of_serial() -> None:
    assert torch.equal(trained("bf16", "pool"), trained("bf16", "serial"))


def test_another_precision_is_refused() -> None:
    with pytest.raises(KeelError, match=r"local\.precision must be .*'float32'.*'bf16'.*\(got 'half'\)"):
        make_spec({"local": {"precision": "half"}})
