"""Building a run from a spec: checks of the task, keyed randomness, layout, engine and sampler, validation split."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel import KeelError, federate
from keel.config.defaults import make_spec
from keel.core.examples import Examples, Partition
from keel.core.randomness import keyed_rng
from keel.core.task import Task
from keel.engines import FORKS
from keel.runs.build import hold_out_validation, make_task
from tests.conftest import make_loop, small_network, uneven_data


def spec_of(**table: Any) -> Any:
    custom = {"data": {"name": "custom"}, "model": {"name": "custom"}}
    return make_spec({"rounds": 4, "evaluation": {"last": 1}, **custom, **table})


def final_model(spec: Any, task: Task) -> Tensor:
    loop = make_loop(spec, task)
    state = loop.start()
    assert loop.run(state) == "finished"
    return state.server["theta"]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(6, 3), r"fails on an input of shape \(5,\)"),
        (nn.Linear(5, 2), "model fails on an input|must have 3 outputs"),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), "buffer 1.running_mean"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)), "training changes the buffer"),
        (nn.LazyLinear(3), "lazy layers"),
    ],
    ids=["input", "classes", "batchnorm", "spectral", "lazy"],
)
def test_a_model_that_does_not_fit_the_data_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        make_task(spec_of(), module=module, data=uneven_data())


@pytest.mark.parametrize("labels", [[1, 2, 3, 1], [3, 3, 1, 2]])
def test_a_model_without_an_output_for_labels_from_1_is_refused_with_a_hint(labels: list[int]) -> None:
    inputs = np.zeros((4, 5))
    data = federate(inputs, labels, test=(inputs, labels), clients=1)
    with pytest.raises(KeelError, match=r"; the labels are 1 to 3: to count them from 0, subtract 1$"):
        make_task(spec_of(), module=nn.Linear(5, 3), data=data)
    make_task(spec_of(), module=nn.Linear(5, 4), data=data)


def test_batch_norm_without_running_statistics_needs_no_policy() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    make_task(spec_of(), module=module, data=uneven_data())


def test_a_loss_that_returns_the_mean_of_the_minibatch_trains_like_one_per_example() -> None:
    def final(loss: Any) -> Tensor:
        return final_model(spec_of(), make_task(spec_of(), module=small_network(), data=uneven_data(), loss=loss))

    torch.testing.assert_close(final(cross_entropy), final(None))
    torch.testing.assert_close(final(nn.CrossEntropyLoss()), final(None))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "mean of the minibatch, not the sum"),
        (lambda outputs, targets: outputs.flatten(), r"got shape \(6,\) for 2 examples"),
        (lambda outputs, targets: 1.0, "got 1.0 for 2 examples"),
        (nn.Linear(3, 1), "has parameters, which would not be trained"),
        ("mse", "local.loss = 'mse' requires targets for regression, but these are targets for classification"),
        ("mes", "unknown local.loss 'mes'; did you mean 'mse'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        make_task(spec_of(), module=small_network(), data=uneven_data(), loss=loss)


def test_a_loss_that_is_passed_is_used() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.softmax(1) - nn.functional.one_hot(targets, 3)).pow(2).sum(1)

    plain = final_model(spec_of(), make_task(spec_of(), module=small_network(), data=uneven_data()))
    custom = final_model(spec_of(), make_task(spec_of(), module=small_network(), data=uneven_data(), loss=squared))
    assert not torch.allclose(plain, custom)


def with_dropout(share: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(share), nn.Linear(16, 3)).eval()


def test_dropout_is_keyed_and_active_even_if_the_module_was_in_eval_mode() -> None:
    spec = spec_of(algorithm={"name": "mime"})
    ends = []
    for stream, share in ((1, 0.5), (2, 0.5), (1, 0.0)):
        task = make_task(spec, module=with_dropout(share), data=uneven_data())
        torch.manual_seed(stream)  # the caller's generator must not matter
        ends.append(final_model(spec, task))
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


PER_CLIENT = "pool" if FORKS else "serial"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


@pytest.mark.parametrize("module", [Branching(), with_dropout(0.5)], ids=["branching", "dropout"])
def test_cohort_refuses_a_model_that_it_cannot_batch(module: nn.Module) -> None:
    spec = spec_of(engine={"name": "cohort"})
    with pytest.raises(
        KeelError, match=r"^engine\.name = 'cohort' cannot batch these clients: .*; use 'pool' or 'serial'$"
    ):
        make_loop(spec, make_task(spec, module=module, data=uneven_data()))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(2 * x)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
def test_hooks_of_the_module_take_effect(algorithm: str) -> None:
    """Doubling the inputs equals a module that doubles them; doubling the gradient equals twice the learning rate."""

    def trained(module: nn.Module, lr: float = 0.1) -> Tensor:
        spec = spec_of(algorithm={"name": algorithm}, local={"lr": lr}, engine={"name": PER_CLIENT, "workers": 2})
        task = make_task(spec, module=module, data=uneven_data())
        return final_model(spec, task)

    forward, backward, plain = small_network(), small_network(), nn.Sequential(small_network(), nn.Identity())
    forward.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    backward[2].register_full_backward_pre_hook(lambda module, gradients: (2 * gradients[0],))
    assert torch.equal(trained(forward), trained(Doubled()))
    assert torch.equal(trained(backward), trained(plain, lr=0.2))


@pytest.mark.parametrize("kind", ["forward_pre_hook", "full_backward_hook"])
def test_cohort_refuses_hooks(kind: str) -> None:
    hooked = small_network()
    getattr(hooked[1], f"register_{kind}")(lambda *_: None)
    spec = spec_of(engine={"name": "cohort"})
    with pytest.raises(KeelError, match=r"cannot batch these clients: the model has hooks; use 'pool' or 'serial'"):
        make_loop(spec, make_task(spec, module=hooked, data=uneven_data()))


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
def test_the_memory_layout_suits_the_model_unless_the_spec_sets_it(
    module: nn.Module, engine: dict[str, str], expected: str
) -> None:
    data = uneven_data()
    images = data.train.inputs.repeat(1, 7)[:, :32].reshape(-1, 2, 4, 4)
    data = replace(data, train=Examples(images, data.train.targets), test=Examples(images, data.train.targets))
    task = make_task(spec_of(engine=engine), module=module, data=data)
    assert task.layout == expected
    transformed = task.data.transform(images)
    assert transformed.is_contiguous(memory_format=torch.channels_last) == (expected == "channels_last")


def test_channels_last_requires_images() -> None:
    with pytest.raises(KeelError, match=r"'channels_last' requires images \(got inputs of shape \(5,\)\)"):
        make_task(spec_of(engine={"layout": "channels_last"}), module=small_network(), data=uneven_data())


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    spec = make_spec({"rounds": 1, "model": {"hidden": [512, 512]}, "evaluation": {"last": 1}})
    before, ends = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            ends.append(final_model(spec, make_task(spec)))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*ends)


def test_validation_examples_are_a_fifth_of_each_clients_training_examples() -> None:
    data = uneven_data(sizes=(10, 5, 20))
    split = make_task(spec_of(evaluation={"on": "validation"}), module=small_network(), data=data).data
    assert split.partition.sizes.tolist() == [8, 4, 16]
    assert len(split.test) == 2 + 1 + 4
    training = {tuple(row) for row in split.train[split.partition.indices].inputs.tolist()}
    assert not training & {tuple(row) for row in split.test.inputs.tolist()}


def test_validation_examples_are_the_first_fifth_of_a_permutation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = uneven_data(sizes=(10, 5, 4, 23))
    rng = keyed_rng(7, "validation")
    shuffled = [rng.permutation(data.partition[client]) for client in range(4)]
    parts = [np.split(indices, [len(indices) // 5]) for indices in shuffled]
    monkeypatch.setattr(Partition, "__getitem__", None)  # too slow for a million clients
    split = hold_out_validation(data, seed=7)
    assert torch.equal(split.test.inputs, data.train[np.concatenate([first for first, _ in parts])].inputs)
    assert split.partition.indices.tolist() == np.concatenate([rest for _, rest in parts]).tolist()


def test_validation_requires_a_client_with_five_examples() -> None:
    spec = spec_of(evaluation={"on": "validation"})
    with pytest.raises(KeelError, match="requires a client with at least five examples"):
        make_task(spec, module=small_network(), data=uneven_data(sizes=(3, 4)))
