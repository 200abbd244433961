"""`auto` batches what can be batched and gains from it, and says why it does not."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from keel.config.defaults import make_spec
from keel.core.engine import Workload
from keel.core.flat_model import Loss
from keel.core.task import Task
from keel.engines import FORKS, choose
from keel.engines.batching import WORK_LIMIT, work_per_step_operation
from keel.runs.build import local_training, make_task
from tests.conftest import uneven_data

CLIENT_BY_CLIENT = "pool" if FORKS else "serial"


class Network(nn.Module):
    """A user's class; `middle` is what differs from test to test."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh, width: int = 4) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(5, width), nn.Linear(width, 3), middle
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.first(inputs)))


class Counting(Network):
    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.lstm(inputs.unsqueeze(2))[0][:, -1])


def hooked() -> nn.Module:
    module = Network()
    module.first.register_forward_hook(lambda *_: None)
    return module


def by_size(hidden: Tensor) -> Tensor:
    return hidden.relu() if len(hidden) > 16 else hidden.tanh()


def branching(hidden: Tensor) -> Tensor:
    return hidden.tanh() if hidden.sum() > 0 else hidden.relu()


def workload(module: nn.Module, loss: Loss | None = None, precision: str = "float32", batch: int = 4) -> Workload:
    spec = make_spec(
        {
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            "local": {"batch": batch, "drop_last": True, "precision": precision},
        }
    )
    task: Task = make_task(spec, module=module, data=uneven_data(sizes=(40, 9, 4, 14)), loss=loss)
    return Workload(task, local_training(spec, task))


def test_a_users_class_with_forward_is_batched() -> None:
    assert choose(workload(Network())).name == "cohort"
    assert choose(workload(Network(nn.LayerNorm(4)))).name == "cohort"


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - outputs.gather(1, targets[:, None])[:, 0]).relu()


def test_a_users_loss_is_batched() -> None:
    assert choose(workload(Network(), margin)).name == "cohort"


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    """Examples count less if others of the minibatch have the same label."""
    same = (targets[:, None] == targets[None]).sum(1)
    return cross_entropy(outputs, targets, reduction="none") / same


class Scheduled:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets, reduction="none")


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs.mean(0)).square().sum(1)


REASONS: dict[str, tuple[Callable[[], Workload], str]] = {
    "a branch on values": (lambda: workload(Network(branching)), "reads the values"),
    "dropout": (lambda: workload(Network(lambda h: dropout(h, 0.5))), "random"),
    "batch statistics": (
        lambda: workload(Network(nn.BatchNorm1d(4, track_running_stats=False))),
        "interacted",
    ),
    "a branch on the batch size": (lambda: workload(Network(by_size), batch=32), "their number mattered"),
    "a loss by label": (lambda: workload(Network(), balanced), "interacted"),
    "a loss that counts": (lambda: workload(Network(), Scheduled()), "the loss's attribute calls"),
    "a loss over the minibatch in bfloat16": (lambda: workload(Network(), contrastive, "bf16"), "interacted"),
    "a loss over the minibatch": (lambda: workload(Network(), contrastive), "interacted"),
    "Python's random numbers": (lambda: workload(Network(lambda h: h * random.random())), "Python or NumPy"),
    "NumPy's random numbers": (
        lambda: workload(Network(lambda h: h * float(np.random.rand()))),  # noqa: NPY002
        "Python or NumPy",
    ),
    "a counter": (lambda: workload(Counting()), "attribute calls"),
    "hooks": (lambda: workload(hooked()), "hooks"),
    "no batched operation": (lambda: workload(Recurrent()), "lstm"),
    "large operations": (lambda: workload(Network(width=30_000)), "large enough"),
    "many parameters": (lambda: workload(Network(width=200_000)), "large enough"),
}


@pytest.mark.parametrize("name", REASONS)
def test_other_models_are_trained_one_client_at_a_time_for_a_reason(name: str) -> None:
    make, reason = REASONS[name]
    choice = choose(make())
    assert choice.name == CLIENT_BY_CLIENT
    assert reason in choice.reason
    assert "\n" not in choice.reason


def test_the_choice_leaves_the_callers_random_numbers_alone() -> None:
    work = workload(Network(lambda h: h * random.random()))
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    choose(work)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002


def test_work_per_step_operation_grows_with_the_model_and_decides() -> None:
    works = []
    for width in (4, 400, 40_000):
        work = workload(Network(width=width))
        works.append(work_per_step_operation(work.task, work.local))
    assert works == sorted(works)
    assert works[0] < WORK_LIMIT < works[-1]
