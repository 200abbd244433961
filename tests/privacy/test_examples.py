"""DP-SGD at a client against a naive loop and against Opacus; membership inference with and without privacy."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy

import keel
from keel.core.flat_model import FlatModel
from keel.core.losses import per_example_cross_entropy
from keel.core.mechanisms import Sender
from keel.privacy.examples import PrivateGradient
from keel.privacy.layers import whole_model

SENDER = Sender(0, 1, 2)


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module, torch.randn(8, 5, generator=generator), torch.arange(8) % 3


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_gradient_is_that_of_a_loop_over_examples(chunk: int | None, layered: bool) -> None:
    module, inputs, targets = problem()
    model = FlatModel(module)
    mechanism = PrivateGradient(clip=0.7, noise=0.0, batch=10, chunk=chunk, layered=layered)
    arguments = (model, per_example_cross_entropy, model.weights.clone(), inputs, targets, SENDER, 0)
    loss, gradient = mechanism.gradient(*arguments)
    total = torch.zeros_like(gradient)
    for example, target in zip(inputs, targets, strict=True):
        one = cross_entropy(module(example[None]), target[None])
        flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(one, list(module.parameters()))])
        total += flat * min(1.0, 0.7 / float(flat.norm()))
    assert torch.allclose(gradient, total / 10, atol=1e-6)
    assert float(loss) == pytest.approx(float(cross_entropy(module(inputs), targets).detach()), rel=1e-5)


def test_the_gradients_of_examples_are_those_of_opacus() -> None:
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    module, inputs, targets = problem()
    model = FlatModel(module)
    _, own = whole_model(model, per_example_cross_entropy, model.weights.clone(), inputs, targets)
    wrapped = opacus.GradSampleModule(problem()[0], loss_reduction="sum")
    cross_entropy(wrapped(inputs.clone().requires_grad_()), targets, reduction="sum").backward()
    theirs = torch.cat([p.grad_sample.reshape(8, -1) for p in wrapped.parameters()], dim=1)
    assert torch.allclose(own.rows, theirs, atol=1e-6)


def test_noise_is_added_to_the_sum_also_of_an_empty_minibatch_and_differs_by_call() -> None:
    model = FlatModel(nn.Linear(999, 100))
    mechanism = PrivateGradient(clip=2.0, noise=1.5, batch=10)
    empty = torch.zeros(0, 999), torch.zeros(0, dtype=torch.long)
    drawn = [
        mechanism.gradient(model, per_example_cross_entropy, model.weights, *empty, SENDER, number)[1]
        for number in (0, 1)
    ]
    assert len(drawn[0]) == 100_000
    assert stats.kstest(drawn[0].numpy() / (1.5 * 2.0 / 10), "norm").pvalue > 0.001
    assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.02


def test_minibatches_are_poisson_samples() -> None:
    sizes = [len(m) for m in PrivateGradient(1.0, 1.0, 5).minibatches(50, 2000, np.random.default_rng(0))]
    assert np.mean(sizes) == pytest.approx(5, rel=0.05)
    assert np.var(sizes) == pytest.approx(4.5, rel=0.1)


WIDTH = 100
"""More than there are examples, so that a linear model fits random labels."""


def attack_advantage(privacy: dict[str, float] | None) -> float:
    """Threshold attack on the losses of an over-fitted model: share of members found minus that of others accused."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(80, WIDTH, generator=generator), torch.randint(0, 2, (80,), generator=generator)
    data = keel.federate(inputs[:40], labels[:40], test=(inputs[40:], labels[40:]), keys=range(40), min_examples=1)
    table = {
        "rounds": 40,
        "algorithm": {"name": "fedavg"},
        "participation": {"rate": 0.5, "sampler": "poisson"},
        "local": {"steps": 3, "lr": 1.0},
        "server": {"weighting": "uniform"},
        "evaluation": {"every": 100, "last": 1},
    }
    if privacy is not None:
        table["privacy"] = privacy
    model = nn.Linear(WIDTH, 2)
    for parameter in model.parameters():
        parameter.data.zero_()
    run = keel.run(table, data=data, model=model)
    with torch.no_grad():
        losses = cross_entropy(run.module(inputs), labels, reduction="none")
    thresholds = losses.sort().values
    return max(
        float((losses[:40] <= t).float().mean() - (losses[40:] <= t).float().mean()) for t in thresholds.tolist()
    )


def test_membership_inference_succeeds_without_privacy_and_fails_with_it() -> None:
    """With epsilon = 0.5 no attack has more than (e^0.5 - 1) / (e^0.5 + 1) = 0.24 in the mean.

    The best of 80 thresholds on 40 members and 40 others has about 0.15 more by chance.
    """
    assert attack_advantage(None) > 0.7
    assert attack_advantage({"clip": 0.2, "noise": 0.0, "delta": 1e-3}) > 0.6  # the noise protects, not the clipping
    assert attack_advantage({"clip": 0.2, "epsilon": 0.5, "delta": 1e-3}) < 0.4
