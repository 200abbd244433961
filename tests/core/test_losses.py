import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keel import KeelError
from keel.core.losses import LOSSES, check_loss, named_loss, one_per_example


def test_named_losses_are_means_over_each_example() -> None:
    torch.manual_seed(0)
    outputs, numbers = torch.randn(5, 3), torch.randn(5, 3)
    labels, several = torch.randint(3, (5,)), torch.randint(2, (5, 3)).float()
    expected = {
        ("mse", "regression"): (numbers, [F.mse_loss(o, t) for o, t in zip(outputs, numbers, strict=True)]),
        ("mae", "regression"): (numbers, [F.l1_loss(o, t) for o, t in zip(outputs, numbers, strict=True)]),
        ("huber", "regression"): (numbers, [F.huber_loss(o, t) for o, t in zip(outputs, numbers, strict=True)]),
        ("cross_entropy", "classification"): (
            labels,
            [F.cross_entropy(o[None], t[None]) for o, t in zip(outputs, labels, strict=True)],
        ),
        ("bce", "multilabel"): (
            several,
            [F.binary_cross_entropy(o.sigmoid(), t) for o, t in zip(outputs, several, strict=True)],
        ),
    }
    for (name, task), (targets, losses) in expected.items():
        torch.testing.assert_close(named_loss(name, task, ())(outputs, targets), torch.stack(losses))


def test_the_loss_of_a_sequence_leaves_padding_out() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 4, 6), torch.tensor([[1, 2, -100, -100], [3, 3, 3, 0]])
    loss = named_loss("sequence_cross_entropy", "sequence", ())(outputs, targets)
    first = F.cross_entropy(outputs[0, :2], targets[0, :2])
    torch.testing.assert_close(loss, torch.stack([first, F.cross_entropy(outputs[1], targets[1])]))


def test_a_column_of_outputs_is_not_broadcast_over_the_targets() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])
    assert LOSSES["mse"].make(())(outputs, targets).tolist() == [0.0, 4.0]
    with pytest.raises(ValueError, match=r"outputs of shape \(2,\) and a target of shape \(\)"):
        LOSSES["mse"].make(())(torch.zeros(2, 2), targets)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_of_torch_become_one_per_example(reduction: str) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 4), torch.randn(2, 4)
    loss = one_per_example(nn.MSELoss(reduction=reduction), outputs, targets)
    more, others = torch.randn(7, 4), torch.randn(7, 4)
    assert loss(more, others).shape == (7,)
    torch.testing.assert_close(loss(more, others).mean(), F.mse_loss(more, others))


def test_a_sum_is_not_taken_for_a_mean() -> None:
    with pytest.raises(KeelError, match="not the sum"):
        one_per_example(nn.MSELoss(reduction="sum"), torch.randn(2, 4), torch.randn(2, 4))


def test_a_loss_with_parameters_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.weight * (outputs - targets) ** 2

    with pytest.raises(KeelError, match="loss Weighted has parameters"):
        check_loss(Weighted())
