"""What does not fit together is said before the first round, and what is drawn is keyed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel import KeelError
from keel.data.federated import Examples, Partition
from keel.engines import FORKS, choose
from keel.randomness import draws
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import Task, hold_out, make_task
from tests.conftest import small_network, uneven_data


def spec_of(**table: Any) -> Any:
    custom = {"data": {"name": "custom"}, "model": {"name": "custom"}}
    return make_spec({"rounds": 4, "evaluation": {"last": 1}, **custom, **table})


def end_of(spec: Any, task: Task) -> Tensor:
    training = Training(spec, task)
    position = training.start()
    assert training.run(position, []) == "finished"
    return position.server["theta"]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(6, 3), r"fails on an input of shape \(5,\)"),
        (nn.Linear(5, 2), "fails on an input|outputs of shape"),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), "buffer 1.running_mean"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)), "training changes the buffer"),
        (nn.LazyLinear(3), "lazy layers"),
    ],
    ids=["input", "classes", "batchnorm", "spectral", "lazy"],
)
def test_models_that_do_not_fit_are_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(KeelError, match=words):
        make_task(spec_of(), module=module, data=uneven_data())


def test_batch_normalisation_without_running_statistics_is_fine() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    make_task(spec_of(), module=module, data=uneven_data())


def test_a_loss_that_is_a_mean_already_is_refused() -> None:
    with pytest.raises(KeelError, match=r"loss: gives shape \(\) for 2 examples; accepted: one loss per example"):
        make_task(spec_of(), module=small_network(), data=uneven_data(), loss=cross_entropy)


def test_a_loss_of_the_users_own_is_used() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.softmax(1) - nn.functional.one_hot(targets, 3)).pow(2).sum(1)

    plain = end_of(spec_of(), make_task(spec_of(), module=small_network(), data=uneven_data()))
    own = end_of(spec_of(), make_task(spec_of(), module=small_network(), data=uneven_data(), loss=squared))
    assert not torch.allclose(plain, own)


def with_dropout(share: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(share), nn.Linear(16, 3)).eval()


def test_dropout_is_keyed_and_on_whatever_state_the_module_came_in() -> None:
    spec = spec_of(algorithm={"name": "mime"})
    ends = []
    for stream, share in ((1, 0.5), (2, 0.5), (1, 0.0)):
        task = make_task(spec, module=with_dropout(share), data=uneven_data())
        torch.manual_seed(stream)  # the caller's own stream plays no part
        ends.append(end_of(spec, task))
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


@pytest.mark.parametrize("module", [Branching(), with_dropout(0.5)], ids=["branching", "dropout"])
def test_cohort_refuses_what_it_cannot_run_as_one_program(module: nn.Module) -> None:
    spec = spec_of(engine={"name": "cohort"})
    with pytest.raises(KeelError, match="'cohort' cannot run this model as one program"):
        Training(spec, make_task(spec, module=module, data=uneven_data()))
    assert choose("auto", make_task(spec, module=module, data=uneven_data())) == ("pool" if FORKS else "serial")


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(2 * x)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
def test_hooks_are_part_of_the_model(algorithm: str) -> None:
    """Twice the inputs are those of a module that doubles them, twice the slope is twice the learning rate."""

    def end(module: nn.Module, lr: float = 0.1) -> Tensor:
        spec = spec_of(algorithm={"name": algorithm}, local={"lr": lr}, engine={"workers": 2})
        task = make_task(spec, module=module, data=uneven_data())
        assert choose("auto", task) == ("pool" if FORKS else "serial")
        return end_of(spec, task)

    forward, backward, plain = small_network(), small_network(), nn.Sequential(small_network(), nn.Identity())
    forward.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    backward[2].register_full_backward_pre_hook(lambda module, slopes: (2 * slopes[0],))
    assert torch.equal(end(forward), end(Doubled()))
    assert torch.equal(end(backward), end(plain, lr=0.2))


def test_cohort_runs_forward_hooks_and_refuses_backward_hooks() -> None:
    hooked = small_network()
    hooked.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    ends = []
    for engine in ("serial", "cohort"):
        spec = spec_of(engine={"name": engine})
        ends.append(end_of(spec, make_task(spec, module=hooked, data=uneven_data())))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
    hooked[1].register_full_backward_hook(lambda module, before, after: (2 * before[0],))
    with pytest.raises(KeelError, match="'cohort' cannot run backward hooks; accepted: 'serial'"):
        Training(spec, make_task(spec, module=hooked, data=uneven_data()))


@pytest.mark.parametrize(
    ("module", "engine", "expected"),
    [
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)), {"device": "cpu"}, "channels_last"),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)), {"layout": "contiguous"}, "contiguous"),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)), {"name": "cohort"}, "contiguous"),
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), {}, "contiguous"),
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), {"layout": "channels_last"}, "channels_last"),
    ],
)
def test_images_lie_as_the_model_has_it_or_the_spec_says(
    module: nn.Module, engine: dict[str, str], expected: str
) -> None:
    data = uneven_data()
    images = data.train.inputs.repeat(1, 7)[:, :32].reshape(-1, 2, 4, 4)
    data = replace(data, train=Examples(images, data.train.targets), test=Examples(images, data.train.targets))
    task = make_task(spec_of(engine=engine), module=module, data=data)
    assert task.layout == expected
    prepared = task.data.prepare(images)
    assert prepared.is_contiguous(memory_format=torch.channels_last) == (expected == "channels_last")


def test_what_is_no_image_has_no_channels() -> None:
    with pytest.raises(KeelError, match=r"engine.layout: 'channels_last' is of images, .* accepted: 'contiguous'"):
        make_task(spec_of(engine={"layout": "channels_last"}), module=small_network(), data=uneven_data())


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    spec = make_spec({"rounds": 2, "model": {"hidden": [512, 512]}, "evaluation": {"last": 1}})
    before, ends = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            ends.append(end_of(spec, make_task(spec)))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*ends)


def test_validation_takes_a_fifth_of_each_client_and_never_looks_at_the_test_set() -> None:
    data = uneven_data(sizes=(10, 5, 20))
    held = make_task(spec_of(evaluation={"on": "validation"}), module=small_network(), data=data).data
    assert held.partition.sizes.tolist() == [8, 4, 16]
    assert len(held.test) == 2 + 1 + 4
    kept = {tuple(row) for row in held.train[held.partition.indices].inputs.tolist()}
    assert not kept & {tuple(row) for row in held.test.inputs.tolist()}


def test_a_validation_part_is_the_first_fifth_of_a_permutation_of_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    data = uneven_data(sizes=(10, 5, 4, 23))
    stream = draws(7, "validation")
    mine = [stream.permutation(data.partition[client]) for client in range(4)]
    parts = [np.split(own, [len(own) // 5]) for own in mine]
    monkeypatch.setattr(Partition, "__getitem__", None)  # a million clients are not looked up one by one
    held = hold_out(data, seed=7)
    assert torch.equal(held.test.inputs, data.train[np.concatenate([first for first, _ in parts])].inputs)
    assert held.partition.indices.tolist() == np.concatenate([rest for _, rest in parts]).tolist()


def test_validation_needs_clients_with_examples_to_spare() -> None:
    spec = spec_of(evaluation={"on": "validation"})
    with pytest.raises(KeelError, match="no client has the five examples"):
        make_task(spec, module=small_network(), data=uneven_data(sizes=(3, 4)))
