"""A program gives each row the loss and gradient that autograd gives one client alone."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, max_pool2d, relu, scaled_dot_product_attention

from keel.core.flat_model import FlatModel
from keel.core.losses import batched_loss, per_example_cross_entropy
from keel.core.program import Program

ROWS, EXAMPLES, CLASSES = 4, 5, 3


class Residual(nn.Module):
    """Uses one layer twice and adds what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            inputs = inputs + gelu(self.norm(self.layer(inputs)))
        return self.last(inputs)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1, stride=2)
        self.last = nn.Linear(3 * 2 * 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = max_pool2d(relu(self.first(images)), 2)
        return self.last(relu(self.second(hidden)).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection, self.last = nn.Embedding(7, 8), nn.Linear(8, 24), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.projection(self.embedding(tokens)).view(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.last(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2).mean(1))


class InPlace(nn.Module):
    """Changes a tensor in place, so that the order of operations matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden.add_(1.0)
        return self.last(hidden.tanh())


class ClassToken(nn.Module):
    """Adds one row to a table of rows: the sum has another shape than the product."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Linear(6, 4), nn.Parameter(torch.randn(5, 4))
        self.last = nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.token(inputs[:1]) + self.table
        return self.last(inputs[:, :4] + rows.mean(0))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    module[2].weight = module[0].weight
    return module


def numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, EXAMPLES, *shape)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, CLASSES), lambda: numbers(6)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, CLASSES)), lambda: numbers(6)),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)), lambda: numbers(6)),
    "rows": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, CLASSES)),
        lambda: numbers(2, 3),
    ),
    "residual": (Residual, lambda: numbers(6)),
    "tied": (tied, lambda: numbers(6)),
    "convolutional": (Convolutional, lambda: numbers(1, 8, 8)),
    "attention": (Attention, lambda: torch.randint(0, 7, (ROWS, EXAMPLES, 6))),
    "class token": (ClassToken, lambda: numbers(6)),
    "in place": (InPlace, lambda: numbers(6)),
}


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - nn.functional.one_hot(targets, CLASSES)).square().sum(1)


LOSSES = {"cross entropy": per_example_cross_entropy, "squared error": squared}


def one_by_one(model: FlatModel, loss: Callable[[Tensor, Tensor], Tensor], rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return losses and gradients of one client after the other, by autograd."""
    losses, gradients = [], []
    for weights, inputs, targets, shares in zip(*rows, strict=True):
        leaf = weights.clone().requires_grad_()
        mean = (loss(model.at(leaf, inputs), targets) * shares).sum()
        losses.append(mean.detach())
        gradients.append(torch.autograd.grad(mean, leaf)[0])
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "first parameter frozen"])
@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("name", MODULES)
def test_each_row_has_the_loss_and_gradient_of_its_client(name: str, loss_name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    make, draw = MODULES[name]
    module = make()
    if frozen:
        next(module.parameters()).requires_grad_(False)
    model, loss = FlatModel(module), LOSSES[loss_name]

    def minibatch() -> list[Tensor]:
        return [draw(), torch.randint(0, CLASSES, (ROWS, EXAMPLES)), torch.rand(ROWS, EXAMPLES)]

    weights = model.weights + 0.3 * torch.randn(ROWS, model.size)
    batched = batched_loss(loss)
    program = Program.of_clients(lambda w, x, y: batched(model.at(w, x), y), [weights, *minibatch()])
    bound = program.bind(weights)
    for _ in range(2):  # other values than those that were recorded, and weights that change in place
        weights.add_(torch.randn_like(weights), alpha=0.1)
        rows = minibatch()
        torch.testing.assert_close(bound(*rows), one_by_one(model, loss, [weights, *rows]), rtol=1e-4, atol=1e-5)


def test_what_a_program_was_given_is_not_changed() -> None:
    module = MODULES["in place"][0]()
    model = FlatModel(module)
    rows = [model.weights.expand(ROWS, -1).clone(), numbers(6), torch.zeros(ROWS, EXAMPLES).long(), torch.rand(ROWS, 5)]
    before = deepcopy(rows)
    Program.of_clients(lambda w, x, y: cross_entropy(model.at(w, x), y, reduction="none"), rows).bind(rows[0])(
        *rows[1:]
    )
    torch.testing.assert_close(rows, before, rtol=0, atol=0)


def test_a_program_has_few_operations_in_a_step() -> None:
    """Views of the weights and constants are made once, biases are added in products, and nothing is copied."""
    model = FlatModel(MODULES["perceptron"][0]())
    rows = [model.weights.expand(ROWS, -1).clone(), numbers(6), torch.zeros(ROWS, EXAMPLES).long(), torch.rand(ROWS, 5)]
    loss = batched_loss(per_example_cross_entropy)
    code = Program.of_clients(lambda w, x, y: loss(model.at(w, x), y), rows).step_code
    assert code.count("baddbmm") == 2
    assert code.count("torch.bmm") == 3
    assert not [name for name in ("split", "clone", "expand", "zeros", "full", "detach") if f".{name}" in code]
