"""The LSTMs compared with naive loops over the equations of Hochreiter and Schmidhuber with forget gates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from keel.core.flat_model import FlatModel
from keel.models import build

VOCABULARY, EMBEDDING, HIDDEN = 7, 3, 4
WIDTHS = {"embedding": EMBEDDING, "hidden": HIDDEN}


def naive_lstm(weights: dict[str, Tensor], layer: int, inputs: list[Tensor]) -> list[Tensor]:
    """Return the states of one layer on one sequence: gates i, f, o and candidate g, cell c, state h."""
    layer_weights = {
        kind: weights[f"lstm.{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    h, c = torch.zeros(HIDDEN), torch.zeros(HIDDEN)
    states = []
    for x in inputs:
        w = layer_weights
        gates = w["weight_ih"] @ x + w["bias_ih"] + w["weight_hh"] @ h + w["bias_hh"]
        i, f, g, o = gates[:HIDDEN], gates[HIDDEN : 2 * HIDDEN], gates[2 * HIDDEN : 3 * HIDDEN], gates[3 * HIDDEN :]
        c = c / (1 + torch.exp(-f)) + torch.tanh(g) / (1 + torch.exp(-i))
        h = torch.tanh(c) / (1 + torch.exp(-o))
        states.append(h)
    return states


def affine(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def naive_char(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    embedded = [weights["embedding.weight"][token] for token in tokens]
    return affine(weights, "output", naive_lstm(weights, 1, naive_lstm(weights, 0, embedded))[-1])


def naive_word(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    embedded = [weights["embedding.weight"][token] for token in tokens]
    states = naive_lstm(weights, 0, embedded)
    return torch.stack([affine(weights, "output", affine(weights, "projection", h)) for h in states])


@pytest.mark.parametrize(("name", "naive"), [("char_lstm", naive_char), ("word_lstm", naive_word)])
def test_lstms_follow_their_equations(name: str, naive: Callable[[dict[str, Tensor], Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = build(name, (6,), VOCABULARY, WIDTHS)
    tokens = torch.randint(VOCABULARY, (5, 6))
    expected = torch.stack([naive(module.state_dict(), row) for row in tokens])
    torch.testing.assert_close(module(tokens), expected)


def test_training_keeps_the_redundant_bias_of_the_word_model_at_zero() -> None:
    model = FlatModel(build("word_lstm", (6,), VOCABULARY, WIDTHS))
    outputs = model.module(torch.randint(VOCABULARY, (5, 6)))
    model.weights.sub_(model.gradient(outputs.pow(2).sum()))
    assert "lstm.bias_hh_l0" not in model.names
    assert not model.module.get_parameter("lstm.bias_hh_l0").any()
